// Entry points for physical memory, addresses and registered memory.
#include "state.h"

using namespace ballonet::standin;
namespace cuda = ballonet::cuda;

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
