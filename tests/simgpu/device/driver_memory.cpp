// Entry points for memory: pages that are mapped, whole allocations, and host memory that a device may use.
#include <sys/mman.h>

#include "state.h"

using namespace simgpu;
using ballonet::standin::Memory;

namespace {

CUmemAllocationProp on_device(int device) {
  CUmemAllocationProp wanted{};
  wanted.type = cuda::kAllocationPinned;
  wanted.location = {cuda::kLocationDevice, device};
  return wanted;
}

CUresult unmap(State& all, Lock& lock, std::uint64_t address, std::uint64_t size) {
  const CUresult refused = all.memory.mappings.whole(address, size, "cuMemUnmap");
  if (refused != cuda::kSuccess) return refused;
  all.engine.before_change(lock, address, size, "unmapped");
  const CUresult failed = all.memory.mappings.unmap(address, size);
  if (failed == cuda::kSuccess) all.watch.changed(address, size, "unmapped");
  return failed;
}

}  // namespace

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
               [&](State& all, auto&) { return all.memory.mappings.free(address, size); });
}

CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, std::size_t size, const CUmemAllocationProp* wanted,
                     Memory::Flags flags) {
  return enter(Needs::kSafe, "cuMemCreate", [&](State& all, auto&) {
    if (++all.creates == all.config.fail_create_at)
      return refuse(cuda::kOutOfMemory, "cuMemCreate: SIMGPU_FAULT=create");
    if (all.config.refuse_host_pages && wanted->location.type != cuda::kLocationDevice)
      return refuse(cuda::kNotSupported, "cuMemCreate: SIMGPU_FAULT=hostnuma");
    return all.memory.create(handle, size, *wanted, flags);
  });
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  return enter(Needs::kContext, "cuMemRelease", [&](State& all, auto&) { return all.memory.mappings.release(handle); });
}

CUresult cuMemMap(CUdeviceptr address, std::size_t size, std::size_t offset, CUmemGenericAllocationHandle handle,
                  Memory::Flags flags) {
  return enter(Needs::kSafe, "cuMemMap", [&](State& all, auto&) {
    const CUresult failed = all.memory.map(address, size, offset, handle, flags);
    if (failed != cuda::kSuccess) return failed;
    ++all.counts.maps;
    all.watch.changed(address, size, "mapped");
    return failed;
  });
}

CUresult cuMemSetAccess(CUdeviceptr address, std::size_t size, const CUmemAccessDesc* wanted, std::size_t count) {
  return enter(Needs::kSafe, "cuMemSetAccess",
               [&](State& all, auto&) { return all.memory.set_access(address, size, wanted, count); });
}

CUresult cuMemUnmap(CUdeviceptr address, std::size_t size) {
  return enter(Needs::kSafe, "cuMemUnmap", [&](State& all, auto& lock) {
    const bool busy = all.engine.busy();
    const CUresult failed = unmap(all, lock, address, size);
    if (failed != cuda::kSuccess) return failed;
    ++all.counts.unmaps;
    all.counts.unmaps_busy += busy;
    return failed;
  });
}

CUresult cuMemGetInfo(std::size_t* free, std::size_t* total) {
  return enter(Needs::kContext, "cuMemGetInfo", [&](State& all, auto&) {
    const Store store = current_device() == 0 ? Store::kDevice : Store::kPeer;
    *total = all.memory.limit(store);
    *free = all.memory.available(store);
    return CUresult{cuda::kSuccess};
  });
}

// A handle of its own, mapped for good: whole pages, as CUDA takes them.
CUresult cuMemAlloc_v2(CUdeviceptr* address, std::size_t size) {
  return enter(Needs::kSafe, "cuMemAlloc", [&](State& all, auto&) {
    if (size == 0) return refuse(cuda::kInvalidValue, "cuMemAlloc: 0 bytes");
    const int device = current_device();
    const std::uint64_t whole = (size + all.memory.page - 1) / all.memory.page * all.memory.page;
    CUmemGenericAllocationHandle handle = 0;
    CUresult failed = all.memory.create(&handle, whole, on_device(device), 0);
    if (failed != cuda::kSuccess) return failed;
    failed = all.memory.reserve(address, whole, 0, 0, 0);
    if (failed == cuda::kSuccess) {
      failed = all.memory.map(*address, whole, 0, handle, 0);
      const CUmemAccessDesc access{{cuda::kLocationDevice, device}, cuda::kAccessReadWrite};
      if (failed == cuda::kSuccess) {
        failed = all.memory.set_access(*address, whole, &access, 1);
        if (failed != cuda::kSuccess) all.memory.mappings.unmap(*address, whole);
      }
      if (failed != cuda::kSuccess) all.memory.mappings.free(*address, whole);
    }
    if (failed != cuda::kSuccess) {
      all.memory.mappings.release(handle);
      return failed;
    }
    all.allocations[*address] = Allocation{whole, handle, device};
    all.watch.changed(*address, whole, "allocated");
    return failed;
  });
}

// Waits for the device first, as CUDA does.
CUresult cuMemFree_v2(CUdeviceptr address) {
  return enter(Needs::kSafe, "cuMemFree", [&](State& all, auto& lock) {
    const auto found = all.allocations.find(address);
    if (found == all.allocations.end()) return refuse(cuda::kInvalidValue, "cuMemFree: %#llx is none", address);
    const Allocation gone = found->second;
    all.allocations.erase(found);
    ++all.counts.synchronizations;
    all.engine.wait_for_all(lock, gone.device);
    CUresult failed = unmap(all, lock, address, gone.size);
    if (failed == cuda::kSuccess) failed = all.memory.mappings.free(address, gone.size);
    if (failed == cuda::kSuccess) failed = all.memory.mappings.release(gone.handle);
    return failed;
  });
}

CUresult cuMemHostAlloc(void** pointer, std::size_t size, unsigned) {
  return enter(Needs::kSafe, "cuMemHostAlloc", [&](State& all, auto&) {
    void* const made = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (made == MAP_FAILED) return refuse(cuda::kOutOfMemory, "cuMemHostAlloc: %zu bytes", size);
    *pointer = made;
    const auto address = reinterpret_cast<std::uint64_t>(made);
    all.watch.pinned[address] = Allocation{size, 0, current_device()};
    all.watch.changed(address, size, "allocated");
    return CUresult{cuda::kSuccess};
  });
}

// Waits for the device first, as CUDA does.
CUresult cuMemFreeHost(void* pointer) {
  return enter(Needs::kSafe, "cuMemFreeHost", [&](State& all, auto& lock) {
    const auto address = reinterpret_cast<std::uint64_t>(pointer);
    if (all.watch.pinned.count(address) == 0) return refuse(cuda::kInvalidValue, "cuMemFreeHost: %p is none", pointer);
    ++all.counts.synchronizations;
    all.engine.wait_for_all(lock, -1);
    const std::uint64_t size = all.watch.pinned.at(address).size;
    all.watch.pinned.erase(address);
    all.watch.changed(address, size, "freed");
    ::munmap(pointer, size);
    return CUresult{cuda::kSuccess};
  });
}

CUresult cuMemHostRegister(void* pointer, std::size_t size, unsigned flags) {
  return enter(Needs::kSafe, "cuMemHostRegister", [&](State& all, auto& lock) {
    const auto address = reinterpret_cast<std::uint64_t>(pointer);
    return all.watch.registered.add(lock, all.memory.mappings, address, size, flags);
  });
}

CUresult cuMemHostUnregister(void* pointer) {
  return enter(Needs::kSafe, "cuMemHostUnregister", [&](State& all, auto& lock) {
    std::uint64_t size = 0;
    const auto address = reinterpret_cast<std::uint64_t>(pointer);
    CUresult failed = all.watch.registered.remove(address, [&](const Run& run) { return size = run.size, false; });
    if (failed != cuda::kSuccess) return failed;
    all.engine.before_change(lock, address, size, "unregistered");
    all.watch.changed(address, size, "unregistered");
    return failed;
  });
}

CUresult cuMemGetAddressRange_v2(CUdeviceptr* base, std::size_t* size, CUdeviceptr address) {
  return enter(Needs::kContext, "cuMemGetAddressRange", [&](State& all, auto&) {
    std::uint64_t start = 0, bytes = 0;
    const auto next = all.allocations.upper_bound(address);
    if (next != all.allocations.begin() && address < std::prev(next)->first + std::prev(next)->second.size) {
      start = std::prev(next)->first;
      bytes = std::prev(next)->second.size;
    } else if (!all.memory.mappings.mapping_at(address, &start, &bytes)) {
      return refuse(cuda::kInvalidValue, "cuMemGetAddressRange: nothing is at %#llx", address);
    }
    if (base != nullptr) *base = start;
    if (size != nullptr) *size = bytes;
    return CUresult{cuda::kSuccess};
  });
}

CUresult cuPointerGetAttribute(void* value, int attribute, CUdeviceptr address) {
  return enter(Needs::kContext, "cuPointerGetAttribute", [&](State& all, auto&) {
    constexpr int kContext = 1, kMemoryType = 2, kDevicePointer = 3, kHostPointer = 4, kOrdinal = 9, kMapped = 13;
    constexpr unsigned kTypeHost = 1, kTypeDevice = 2;
    std::vector<Run> runs;
    const CUresult refused =
        all.memory.mappings.locate(address, 1, cuda::kInvalidValue, "cuPointerGetAttribute", &runs);
    if (refused != cuda::kSuccess) return refused;
    const Store store = runs.front().store;
    if (store == Store::kPlain && !all.watch.is_pinned(address, 1))
      return refuse(cuda::kInvalidValue, "cuPointerGetAttribute: %#llx is no memory of CUDA's", address);
    const bool device = store == Store::kDevice || store == Store::kPeer;
    switch (attribute) {
      case kMemoryType:
        *static_cast<unsigned*>(value) = device ? kTypeDevice : kTypeHost;
        break;
      case kDevicePointer:
        *static_cast<CUdeviceptr*>(value) = address;
        break;
      case kHostPointer:
        *static_cast<CUdeviceptr*>(value) = device ? 0 : address;
        break;
      case kOrdinal:
        *static_cast<int*>(value) = store == Store::kPeer ? 1 : device ? 0 : current_device();
        break;
      case kMapped:
        *static_cast<bool*>(value) = true;
        break;
      case kContext:
        *static_cast<CUcontext*>(value) = nullptr;
        break;
      default:
        return refuse(cuda::kInvalidValue, "cuPointerGetAttribute: attribute %d", attribute);
    }
    return CUresult{cuda::kSuccess};
  });
}
