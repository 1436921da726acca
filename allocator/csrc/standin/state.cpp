#include "state.h"

#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#include <cerrno>

#include "extents.h"

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

// Fork: the child's pages are its own, and the device is closed to it.
//
// Note [Eager copies]. The pool's pages are shared mappings, so after a fork both processes would write into the same
// memory. A private mapping of the memfd is no cure: it shows the parent's later writes until the child writes itself.
// So the child copies every visible page before fork() returns in it, and the parent waits for that inside its own
// fork(), holding the lock: nothing is remapped meanwhile. Other threads of the parent go on, and so does a copy that
// is under way; what they write during that time may or may not be seen. Aliases part: two addresses of one page become
// two pages. What is idle (ballonet_standin_idle: free blocks of the caching allocator, pages that were given up) is
// not copied: the child has zeros there. Where RAM does not suffice for the copies the child's pages are inaccessible:
// a child that only calls exec does not notice, another faults rather than computing with its parent's later bytes.
//
// The pipe tells the parent that the child is done, or dead: it reads the end of file. Nothing here allocates, so that
// the child stays within what is allowed after a fork of a process with several threads.

namespace {

int done_pipe[2] = {-1, -1};

void close_both() {
  for (int& end : done_pipe) {
    if (end >= 0) ::close(end);
    end = -1;
  }
}

void before() {
  State& all = state();
  all.mutex.lock();  // kept until the fork is over, on both sides
  if (!all.forked && ::pipe2(done_pipe, O_CLOEXEC) != 0) done_pipe[0] = done_pipe[1] = -1;
}

void in_parent() {
  if (done_pipe[0] >= 0) {
    ::close(done_pipe[1]);
    done_pipe[1] = -1;
    char byte;
    while (::read(done_pipe[0], &byte, 1) < 0 && errno == EINTR) {
    }
  }
  close_both();
  state().mappings.no_longer_idle();
  state().mutex.unlock();
}

void in_child() {
  State& all = state();
  if (!all.forked) {
    all.forked = true;
    const bool parent_waits = done_pipe[0] >= 0;
    all.mappings.privatize(parent_waits && ram_available() > all.mappings.private_bytes() + ram_margin());
    close_both();
  }
  all.mutex.unlock();
}

}  // namespace

CUresult watch_forks() {
  static const int failed = ::pthread_atfork(before, in_parent, in_child);
  return failed == 0 ? CUresult{cuda::kSuccess} : refuse(cuda::kOutOfMemory, "cuInit: pthread_atfork failed");
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
