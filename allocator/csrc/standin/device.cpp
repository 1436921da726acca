// Entry points about the stand-in and its devices: 0, which computes, and 1, a peer that has memory and nothing else.
#include <algorithm>
#include <cstdio>

#include "extents.h"
#include "results.h"
#include "state.h"

using namespace ballonet::standin;
namespace cuda = ballonet::cuda;

CUresult cuDriverGetVersion(int* version) {
  *version = 13000;
  return cuda::kSuccess;
}

CUresult cuDeviceGetCount(int* count) {
  return enter(Needs::kInit, "cuDeviceGetCount", [&](State&, auto&) {
    *count = kDevices;
    return CUresult{cuda::kSuccess};
  });
}

CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  return enter(Needs::kInit, "cuDeviceGet", [&](State&, auto&) {
    *device = ordinal;
    return check_known(ordinal, "cuDeviceGet");
  });
}

CUresult cuDeviceGetName(char* name, int length, CUdevice device) {
  return enter(Needs::kInit, "cuDeviceGetName", [&](State&, auto&) {
    const char* const text = device == kPeerDevice ? "ballonet host stand-in, peer" : "ballonet host stand-in";
    if (length > 0) std::snprintf(name, static_cast<std::size_t>(length), "%s", text);
    return check_known(device, "cuDeviceGetName");
  });
}

CUresult cuDeviceGetAttribute(int* value, int attribute, CUdevice device) {
  return enter(Needs::kInit, "cuDeviceGetAttribute", [&](State&, auto&) {
    switch (attribute) {
      case cuda::kAttributeVirtualMemory:
      case cuda::kAttributePosixFd:
      case cuda::kAttributeReadOnlyRegister:
      case cuda::kAttributeHostNumaVirtualMemory:
        *value = 1;
        break;
      case cuda::kAttributeIntegrated:
      case cuda::kAttributeComputeMajor:
      case cuda::kAttributeComputeMinor:
      case cuda::kAttributeHostNumaId:
      case cuda::kAttributeRdmaVirtualMemory:
        *value = 0;
        break;
      default:
        return refuse(cuda::kInvalidValue, "cuDeviceGetAttribute: the stand-in does not know attribute %d", attribute);
    }
    return check_known(device, "cuDeviceGetAttribute");
  });
}

CUresult cuDeviceCanAccessPeer(int* can, CUdevice device, CUdevice peer) {
  return enter(Needs::kInit, "cuDeviceCanAccessPeer", [&](State&, auto&) {
    *can = device == 0 && peer == kPeerDevice;
    const CUresult refused = check_known(device, "cuDeviceCanAccessPeer");
    return refused == cuda::kSuccess ? check_known(peer, "cuDeviceCanAccessPeer") : refused;
  });
}

CUresult cuDeviceTotalMem(std::size_t* bytes, CUdevice device) {
  return enter(Needs::kInit, "cuDeviceTotalMem", [&](State& all, auto&) {
    *bytes = device == kPeerDevice ? ram_total() : all.memory.limit(Store::kDevice);
    return check_known(device, "cuDeviceTotalMem");
  });
}

CUresult cuMemGetInfo(std::size_t* free, std::size_t* total) {
  return enter(Needs::kContext, "cuMemGetInfo", [&](State& all, auto&) {
    *total = all.memory.limit(Store::kDevice);
    *free = all.memory.available(Store::kDevice);
    return CUresult{cuda::kSuccess};
  });
}

CUresult cuGetErrorName(CUresult result, const char** name) {
  return result_name(result, name) ? CUresult{cuda::kSuccess} : CUresult{cuda::kInvalidValue};
}

CUresult cuGetErrorString(CUresult result, const char** text) {
  return result_text(result, text) ? CUresult{cuda::kSuccess} : CUresult{cuda::kInvalidValue};
}

CUresult ballonet_standin_configure(const BallonetStandinConfig* config) {
  return enter(Needs::kNothing, "ballonet_standin_configure", [&](State& all, auto&) {
    all.memory.limits[static_cast<int>(Store::kDevice)] =
        config->device_bytes == 0 ? ram_total() : config->device_bytes;
    all.mappings.back(Store::kDevice, config->unbacked == 0);
    all.engine.configure(config->link_bandwidth, config->link_latency_ns, config->peer_bandwidth);
    return CUresult{cuda::kSuccess};
  });
}

CUresult ballonet_standin_violation(char* text, std::size_t capacity) {
  if (capacity > 0) std::snprintf(text, capacity, "%s", refusal());
  return cuda::kSuccess;
}

CUresult ballonet_standin_memfds(int* device, int* host, int* peer) {
  return enter(Needs::kInit, "ballonet_standin_memfds", [&](State& all, auto&) {
    *device = all.mappings.fd(Store::kDevice);
    *host = all.mappings.fd(Store::kHost);
    *peer = all.mappings.fd(Store::kPeer);
    return CUresult{cuda::kSuccess};
  });
}

// Entry points for physical memory, addresses and registered memory.

CUresult cuMemGetAllocationGranularity(std::size_t* granularity, const CUmemAllocationProp* wanted, int option) {
  return enter(Needs::kInit, "cuMemGetAllocationGranularity",
               [&](State& all, auto&) { return all.memory.granularity(granularity, *wanted, option); });
}

CUresult cuMemAddressReserve(CUdeviceptr* address, std::size_t size, std::size_t alignment, CUdeviceptr hint,
                             Memory::Flags flags) {
  return enter(Needs::kContext, "cuMemAddressReserve",
               [&](State& all, auto&) { return all.memory.reserve(address, size, alignment, hint, flags); });
}

CUresult cuMemAddressFree(CUdeviceptr address, std::size_t size) {
  return enter(Needs::kContext, "cuMemAddressFree",
               [&](State& all, auto&) { return all.mappings.free(address, size); });
}

CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, std::size_t size, const CUmemAllocationProp* wanted,
                     Memory::Flags flags) {
  return enter(Needs::kContext, "cuMemCreate",
               [&](State& all, auto&) { return all.memory.create(handle, size, *wanted, flags); });
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  return enter(Needs::kContext, "cuMemRelease", [&](State& all, auto&) { return all.mappings.release(handle); });
}

CUresult cuMemMap(CUdeviceptr address, std::size_t size, std::size_t offset, CUmemGenericAllocationHandle handle,
                  Memory::Flags flags) {
  return enter(Needs::kContext, "cuMemMap",
               [&](State& all, auto&) { return all.memory.map(address, size, offset, handle, flags); });
}

CUresult cuMemSetAccess(CUdeviceptr address, std::size_t size, const CUmemAccessDesc* wanted, std::size_t count) {
  return enter(Needs::kContext, "cuMemSetAccess",
               [&](State& all, auto&) { return all.memory.set_access(address, size, wanted, count); });
}

CUresult cuMemUnmap(CUdeviceptr address, std::size_t size) {
  return enter(Needs::kContext, "cuMemUnmap", [&](State& all, auto&) {
    CUresult failed = all.mappings.whole(address, size, "cuMemUnmap");
    if (failed == cuda::kSuccess) failed = all.order.may_unmap(address, size);
    if (failed == cuda::kSuccess) failed = all.mappings.unmap(address, size);
    if (failed == cuda::kSuccess) all.order.unmapped(address, size);
    return failed;
  });
}

CUresult cuMemHostRegister(void* pointer, std::size_t size, unsigned flags) {
  return enter(Needs::kContext, "cuMemHostRegister", [&](State& all, auto& lock) {
    return all.registered.add(lock, all.mappings, reinterpret_cast<std::uint64_t>(pointer), size, flags);
  });
}

CUresult cuMemHostUnregister(void* pointer) {
  return enter(Needs::kContext, "cuMemHostUnregister", [&](State& all, auto&) {
    return all.registered.remove(reinterpret_cast<std::uint64_t>(pointer),
                                 [&](const Run& run) { return all.engine.touched_by_pending({run}); });
  });
}

CUresult ballonet_standin_hold(CUdeviceptr address, std::size_t size, int held) {
  return enter(Needs::kInit, "ballonet_standin_hold", [&](State& all, auto&) {
    held != 0 ? all.mappings.hold(address) : all.mappings.let_go(address, size);
    return CUresult{cuda::kSuccess};
  });
}

CUresult ballonet_standin_idle(CUdeviceptr address, std::size_t size) {
  return enter(Needs::kInit, "ballonet_standin_idle", [&](State& all, auto&) {
    all.mappings.idle(address, size);
    return CUresult{cuda::kSuccess};
  });
}
