// Entry points for physical memory and addresses: the arguments are checked here, the work is done in mappings.cpp.
#include "state.h"

using namespace ballonet::standin;
namespace cuda = ballonet::cuda;

namespace {

using ull = unsigned long long;

CUresult check_location(const CUmemLocation& location, const char* function) {
  const bool known = (location.type == cuda::kLocationDevice && location.id >= 0 && location.id < kDevices) ||
                     (location.type == cuda::kLocationHostNuma && location.id == 0);
  if (known) return cuda::kSuccess;
  return refuse(cuda::kInvalidValue, "%s: location type %d id %d is neither device 0 nor 1 nor host NUMA node 0",
                function, location.type, location.id);
}

CUresult check_properties(const CUmemAllocationProp& wanted, const char* function) {
  if (wanted.type != cuda::kAllocationPinned) {
    return refuse(cuda::kInvalidValue, "%s: allocation type %d is not pinned", function, wanted.type);
  }
  if (wanted.requestedHandleTypes != cuda::kHandleNone && wanted.requestedHandleTypes != cuda::kHandlePosixFd) {
    return refuse(cuda::kNotSupported, "%s: handle types %#x are not exportable here", function,
                  static_cast<unsigned>(wanted.requestedHandleTypes));
  }
  return check_location(wanted.location, function);
}

Store store_of(const CUmemLocation& location) {
  if (location.type != cuda::kLocationDevice) return Store::kHost;
  return location.id == kPeerDevice ? Store::kPeer : Store::kDevice;
}

CUresult check_size(std::uint64_t size, const char* function) {
  if (size != 0 && size % kGranularity == 0) return cuda::kSuccess;
  return refuse(cuda::kInvalidValue, "%s: size %llu is not a positive multiple of the granularity %llu", function,
                ull{size}, ull{kGranularity});
}

CUresult check_flags(ull flags, const char* function) {
  return flags == 0 ? CUresult{cuda::kSuccess} : refuse(cuda::kInvalidValue, "%s: flags must be 0", function);
}

// Runs the checks in order until one refuses.
template <class... Checks>
CUresult first_refusal(Checks... checks) {
  CUresult result = cuda::kSuccess;
  static_cast<void>((((result = checks()) == cuda::kSuccess) && ...));
  return result;
}

}  // namespace

CUresult cuMemGetAllocationGranularity(std::size_t* granularity, const CUmemAllocationProp* wanted, int option) {
  return enter(Needs::kInit, "cuMemGetAllocationGranularity", [&](State&, auto&) {
    *granularity = kGranularity;
    if (option != cuda::kGranularityMinimum && option != 1) {
      return refuse(cuda::kInvalidValue, "cuMemGetAllocationGranularity: option %d is neither minimum nor recommended",
                    option);
    }
    return check_properties(*wanted, "cuMemGetAllocationGranularity");
  });
}

CUresult cuMemAddressReserve(CUdeviceptr* address, std::size_t size, std::size_t alignment, CUdeviceptr hint,
                             ull flags) {
  return enter(Needs::kContext, "cuMemAddressReserve", [&](State& all, auto&) {
    const char* const function = "cuMemAddressReserve";
    return first_refusal([&] { return check_flags(flags, function); }, [&] { return check_size(size, function); },
                         [&] {
                           if ((alignment & (alignment - 1)) == 0) return CUresult{cuda::kSuccess};
                           return refuse(cuda::kInvalidValue, "%s: alignment %zu is not a power of two", function,
                                         alignment);
                         },
                         [&] {
                           std::uint64_t reserved = 0;
                           const CUresult failed = all.mappings.reserve(size, alignment, hint, &reserved);
                           if (failed == cuda::kSuccess) *address = reserved;
                           return failed;
                         });
  });
}

CUresult cuMemAddressFree(CUdeviceptr address, std::size_t size) {
  return enter(Needs::kContext, "cuMemAddressFree",
               [&](State& all, auto&) { return all.mappings.free(address, size); });
}

CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, std::size_t size, const CUmemAllocationProp* wanted,
                     ull flags) {
  return enter(Needs::kContext, "cuMemCreate", [&](State& all, auto&) {
    const char* const function = "cuMemCreate";
    return first_refusal([&] { return check_flags(flags, function); }, [&] { return check_size(size, function); },
                         [&] { return check_properties(*wanted, function); },
                         [&] {
                           const std::uint64_t exist = all.mappings.bytes(Store::kDevice);
                           if (store_of(wanted->location) != Store::kDevice ||
                               (exist <= all.device_bytes && size <= all.device_bytes - exist))
                             return CUresult{cuda::kSuccess};
                           return refuse(cuda::kOutOfMemory,
                                         "cuMemCreate: %zu bytes do not fit: %llu of the device's %llu bytes exist",
                                         size, ull{exist}, ull{all.device_bytes});
                         },
                         [&] {
                           std::uint64_t made = 0;
                           const CUresult failed = all.mappings.create(size, store_of(wanted->location), &made);
                           if (failed == cuda::kSuccess) *handle = made;
                           return failed;
                         });
  });
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  return enter(Needs::kContext, "cuMemRelease", [&](State& all, auto&) { return all.mappings.release(handle); });
}

CUresult cuMemMap(CUdeviceptr address, std::size_t size, std::size_t offset, CUmemGenericAllocationHandle handle,
                  ull flags) {
  return enter(Needs::kContext, "cuMemMap", [&](State& all, auto&) {
    const char* const function = "cuMemMap";
    return first_refusal([&] { return check_flags(flags, function); }, [&] { return check_size(size, function); },
                         [&] {
                           if (offset == 0) return CUresult{cuda::kSuccess};
                           return refuse(cuda::kInvalidValue, "%s: offset %zu must be 0", function, offset);
                         },
                         [&] { return all.mappings.map(address, size, handle); });
  });
}

CUresult cuMemSetAccess(CUdeviceptr address, std::size_t size, const CUmemAccessDesc* wanted, std::size_t count) {
  return enter(Needs::kContext, "cuMemSetAccess", [&](State& all, auto&) {
    bool for_device = false, for_cpu = false, other = false;
    for (std::size_t i = 0; i < count; ++i) {
      const bool device = wanted[i].location.type == cuda::kLocationDevice && wanted[i].location.id == 0;
      const bool cpu = wanted[i].location.type == cuda::kLocationHostNuma;  // whatever its id
      for_device |= device;
      for_cpu |= cpu;
      other |= !(device || cpu) || wanted[i].flags != cuda::kAccessReadWrite;
    }
    if (other || !for_device) {
      return refuse(cuda::kNotSupported,
                    "cuMemSetAccess: the stand-in gives read and write access to device 0, to the CPU too where it is "
                    "wanted, and nothing else");
    }
    return all.mappings.set_access(address, size, for_cpu);
  });
}

CUresult cuMemUnmap(CUdeviceptr address, std::size_t size) {
  return enter(Needs::kContext, "cuMemUnmap", [&](State& all, auto&) {
    return first_refusal([&] { return all.mappings.whole(address, size, "cuMemUnmap"); },
                         [&] { return all.order.may_unmap(address, size); },
                         [&] {
                           const CUresult failed = all.mappings.unmap(address, size);
                           if (failed == cuda::kSuccess) all.order.unmapped(address, size);
                           return failed;
                         });
  });
}

CUresult ballonet_standin_idle(CUdeviceptr address, std::size_t size) {
  return enter(Needs::kInit, "ballonet_standin_idle", [&](State& all, auto&) {
    all.mappings.idle(address, size);
    return CUresult{cuda::kSuccess};
  });
}
