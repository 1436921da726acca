#include "memory.h"

#include <algorithm>

#include "results.h"

namespace ballonet::standin {
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

Store store_of(const CUmemLocation& location) {
  if (location.type != cuda::kLocationDevice) return Store::kHost;
  return location.id == kPeerDevice ? Store::kPeer : Store::kDevice;
}

CUresult Memory::check_size(std::uint64_t size, const char* function) const {
  if (size != 0 && size % page == 0) return cuda::kSuccess;
  return refuse(cuda::kInvalidValue, "%s: size %llu is not a positive multiple of the granularity %llu", function,
                ull{size}, ull{page});
}

std::uint64_t Memory::available(Store store) const {
  return limit(store) - std::min(limit(store), mappings.bytes(store));
}

CUresult Memory::granularity(std::size_t* bytes, const CUmemAllocationProp& wanted, int option) const {
  const char* const function = "cuMemGetAllocationGranularity";
  *bytes = page;
  if (option != cuda::kGranularityMinimum && option != 1) {
    return refuse(cuda::kInvalidValue, "%s: option %d is neither minimum nor recommended", function, option);
  }
  return check_properties(wanted, function);
}

CUresult Memory::reserve(CUdeviceptr* address, std::size_t size, std::size_t alignment, CUdeviceptr hint, Flags flags) {
  const char* const function = "cuMemAddressReserve";
  return first_refusal([&] { return check_flags(flags, function); }, [&] { return check_size(size, function); },
                       [&] {
                         if ((alignment & (alignment - 1)) == 0) return CUresult{cuda::kSuccess};
                         return refuse(cuda::kInvalidValue, "%s: alignment %zu is not a power of two", function,
                                       alignment);
                       },
                       [&] {
                         std::uint64_t reserved = 0;
                         const std::uint64_t aligned = std::max<std::uint64_t>(alignment, page);
                         const CUresult failed = mappings.reserve(size, aligned, hint, &reserved);
                         if (failed == cuda::kSuccess) *address = reserved;
                         return failed;
                       });
}

CUresult Memory::create(CUmemGenericAllocationHandle* handle, std::size_t size, const CUmemAllocationProp& wanted,
                        Flags flags) {
  const char* const function = "cuMemCreate";
  return first_refusal([&] { return check_flags(flags, function); }, [&] { return check_size(size, function); },
                       [&] { return check_properties(wanted, function); },
                       [&] {
                         const Store store = store_of(wanted.location);
                         if (size <= available(store)) return CUresult{cuda::kSuccess};
                         return refuse(cuda::kOutOfMemory,
                                       "cuMemCreate: %zu bytes do not fit: %llu of the device's %llu bytes exist", size,
                                       ull{mappings.bytes(store)}, ull{limit(store)});
                       },
                       [&] {
                         std::uint64_t made = 0;
                         const CUresult failed = mappings.create(size, store_of(wanted.location), &made);
                         if (failed == cuda::kSuccess) *handle = made;
                         return failed;
                       });
}

CUresult Memory::map(CUdeviceptr address, std::size_t size, std::size_t offset, CUmemGenericAllocationHandle handle,
                     Flags flags) {
  const char* const function = "cuMemMap";
  return first_refusal([&] { return check_flags(flags, function); }, [&] { return check_size(size, function); },
                       [&] {
                         if (offset == 0) return CUresult{cuda::kSuccess};
                         return refuse(cuda::kInvalidValue, "%s: offset %zu must be 0", function, offset);
                       },
                       [&] { return mappings.map(address, size, handle); });
}

CUresult Memory::set_access(CUdeviceptr address, std::size_t size, const CUmemAccessDesc* wanted, std::size_t count) {
  bool for_device = false, for_cpu = false, other = false;
  for (std::size_t i = 0; i < count; ++i) {
    const CUmemLocation& location = wanted[i].location;
    const bool device = location.type == cuda::kLocationDevice && location.id >= 0 && location.id < computing;
    const bool cpu = location.type == cuda::kLocationHostNuma;  // whatever its id
    for_device |= device;
    for_cpu |= cpu;
    other |= !(device || cpu) || wanted[i].flags != cuda::kAccessReadWrite;
  }
  if (other || !for_device) {
    return refuse(
        cuda::kNotSupported,
        "cuMemSetAccess: read and write access is given to a device that computes, to the CPU too where it is "
        "wanted, and nothing else");
  }
  return mappings.set_access(address, size, for_cpu);
}

}  // namespace ballonet::standin
