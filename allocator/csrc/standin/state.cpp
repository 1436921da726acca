#include "state.h"

#include "ram.h"

namespace ballonet::standin {
namespace {

thread_local CUcontext current = nullptr;

CUcontext primary(const State& all) {
  constexpr std::uintptr_t kBase = 0xc0000000000;  // no address of anything: a context is never followed
  return reinterpret_cast<CUcontext>(kBase + all.context_serial * 16);
}

// At exit, or when the library is closed.
__attribute__((destructor)) void stop_engine() {
  if (!state().forked) state().engine.stop();  // a child has inherited no thread
}

}  // namespace

State& state() {
  static State& all = *new State;
  return all;
}

CUresult check_known(CUdevice device, const char* function) {
  if (device >= 0 && device < kDevices) return cuda::kSuccess;
  return refuse(cuda::kInvalidDevice, "%s: device %d does not exist; the stand-in has device 0, and 1 as its peer",
                function, device);
}

CUresult check_device(CUdevice device, const char* function) {
  const CUresult refused = check_known(device, function);
  if (refused != cuda::kSuccess || device == 0) return refused;
  return refuse(cuda::kNotSupported, "%s: device %d of the stand-in has memory and does not compute", function, device);
}

CUresult admit(const State& all, Needs needs, const char* function) {
  if (all.forked) {
    return refuse(cuda::kNotPermitted,
                  "%s: this process was forked from one that uses the device; a child may only read and "
                  "write the memory it inherited",
                  function);
  }
  if (needs != Needs::kNothing && !all.initialized) {
    return refuse(cuda::kNotInitialized, "%s: cuInit was not called", function);
  }
  if (needs == Needs::kContext && (all.retained == 0 || current != primary(all))) {
    return refuse(cuda::kInvalidContext,
                  "%s: this thread has no current context; retain the primary context and call "
                  "cuCtxSetCurrent",
                  function);
  }
  return cuda::kSuccess;
}

}  // namespace ballonet::standin

using namespace ballonet::standin;
namespace cuda = ballonet::cuda;

CUresult cuInit(unsigned flags) {
  return enter(Needs::kNothing, "cuInit", [&](State& all, auto&) {
    if (flags != 0) return refuse(cuda::kInvalidValue, "cuInit: flags must be 0");
    if (all.initialized) return CUresult{cuda::kSuccess};
    CUresult failed = all.mappings.open();
    if (failed == cuda::kSuccess) failed = watch_forks();
    if (failed != cuda::kSuccess) return failed;
    if (all.memory.limits[0] == 0) all.memory.limits[0] = ram_total();
    all.initialized = true;
    return CUresult{cuda::kSuccess};
  });
}

CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  return enter(Needs::kInit, "cuDevicePrimaryCtxRetain", [&](State& all, auto&) {
    const CUresult refused = check_device(device, "cuDevicePrimaryCtxRetain");
    if (refused != cuda::kSuccess) return refused;
    if (all.retained++ == 0) ++all.context_serial;
    *context = primary(all);
    return CUresult{cuda::kSuccess};
  });
}

// The last release waits for all work and takes the streams, the events and what is registered with it; memory of the
// device stays.
CUresult cuDevicePrimaryCtxRelease(CUdevice device) {
  return enter(Needs::kInit, "cuDevicePrimaryCtxRelease", [&](State& all, auto& lock) {
    const CUresult refused = check_device(device, "cuDevicePrimaryCtxRelease");
    if (refused != cuda::kSuccess) return refused;
    if (all.retained == 0) return refuse(cuda::kInvalidContext, "cuDevicePrimaryCtxRelease: it is not retained");
    if (--all.retained > 0) return CUresult{cuda::kSuccess};
    const Clock now = all.order.publish_all();
    all.streams.clear();
    all.events.clear();
    all.engine.drain(lock);
    all.order.join_host(now);
    all.registered.clear();
    return CUresult{cuda::kSuccess};
  });
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) {
  return enter(Needs::kInit, "cuDevicePrimaryCtxGetState", [&](State& all, auto&) {
    const CUresult refused = check_device(device, "cuDevicePrimaryCtxGetState");
    if (refused != cuda::kSuccess) return refused;
    *flags = 0;
    *active = all.retained > 0;
    return CUresult{cuda::kSuccess};
  });
}

CUresult cuCtxSetCurrent(CUcontext context) {
  return enter(Needs::kInit, "cuCtxSetCurrent", [&](State& all, auto&) {
    if (context != nullptr && (all.retained == 0 || context != primary(all))) {
      return refuse(cuda::kInvalidContext, "cuCtxSetCurrent: %p is not the retained primary context",
                    static_cast<void*>(context));
    }
    current = context;
    return CUresult{cuda::kSuccess};
  });
}

CUresult cuCtxGetCurrent(CUcontext* context) {
  return enter(Needs::kInit, "cuCtxGetCurrent", [&](State&, auto&) {
    *context = current;
    return CUresult{cuda::kSuccess};
  });
}
