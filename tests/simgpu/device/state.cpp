#include "state.h"

#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>

namespace simgpu {
namespace {

constexpr int kExitStatus = 86;                         // of a process in which something was reported
constexpr std::uintptr_t kContextBase = 0xc0000000000;  // no address of anything: a context is never followed

thread_local CUcontext current = nullptr;

CUcontext primary(const State& all, int device) {
  const std::uint64_t number =
      all.contexts[device].serial * ballonet::standin::kDevices + static_cast<unsigned>(device);
  return reinterpret_cast<CUcontext>(kContextBase + number * 16);
}

CUresult check_device(const State& all, CUdevice device, const char* function) {
  if (device >= 0 && device < all.config.devices) return cuda::kSuccess;
  return refuse(cuda::kInvalidDevice, "%s: there is no device %d", function, device);
}

bool alive(const State& all, CUcontext context) {
  for (int device = 0; device < all.config.devices; ++device) {
    if (context == primary(all, device)) return all.contexts[device].retained > 0;
  }
  return false;
}

void before_fork() { state().mutex.lock(); }
void after_fork() { state().mutex.unlock(); }

void in_child() {  // CUDA does not survive a fork, nor does the memory of a device
  State& all = state();
  if (!all.forked) all.memory.mappings.privatize(false);
  all.forked = true;
  all.mutex.unlock();
}

// Ends the threads at exit. A process in which something was reported does not end well, whatever it says itself.
__attribute__((destructor)) void finish() {
  State& all = state();
  if (all.forked) return;
  Lock lock(all.mutex);
  all.engine.stop(lock);
  if (all.counts.reports == 0) return;
  std::fflush(nullptr);
  ::_exit(kExitStatus);
}

}  // namespace

State& state() {
  static State& all = *new State;
  return all;
}

int current_device() {
  if (current == nullptr) return -1;
  const std::uintptr_t number = (reinterpret_cast<std::uintptr_t>(current) - kContextBase) / 16;
  return static_cast<int>(number % ballonet::standin::kDevices);
}

CUresult admit(State& all, Needs needs, const char* function) {
  if (all.forked) return refuse(cuda::kNotInitialized, "%s: the process was forked from one that used CUDA", function);
  if (needs == Needs::kNothing) return cuda::kSuccess;
  if (!all.initialized) return refuse(cuda::kNotInitialized, "%s: cuInit was not called", function);
  if (needs == Needs::kInit) return cuda::kSuccess;
  if (all.dead != cuda::kSuccess) return refuse(all.dead, "%s: the device is dead since an earlier error", function);
  if (current_device() < 0 || !alive(all, current)) {
    return refuse(cuda::kInvalidContext, "%s: this thread has no current context", function);
  }
  return needs == Needs::kSafe ? check_safe(all, function) : CUresult{cuda::kSuccess};
}

void write_report(State& all, const std::string& text, bool violation) {
  all.counts.reports += violation;
  if (violation) all.newest_report = text;
  const std::string line = std::string("simgpu: ") + (violation ? "VIOLATION: " : "note: ") + text + "\n";
  std::fputs(line.c_str(), stderr);
  std::fflush(stderr);
  if (all.config.report.empty()) return;
  if (std::FILE* file = std::fopen(all.config.report.c_str(), "ae")) {
    std::fputs(line.c_str(), file);
    std::fclose(file);
  }
}

CUresult submit(State& all, Lock& lock, const StreamPtr& stream, const std::shared_ptr<Work>& work) {
  if (stream->capture) return add_node(stream, Node{work, {}, nullptr, nullptr}, work->name.c_str());
  const CUresult refused = check_legacy(all, *stream, work->name.c_str());
  if (refused == cuda::kSuccess) all.engine.submit(lock, stream, work);
  return refused;
}

}  // namespace simgpu

using namespace simgpu;

CUresult cuInit(unsigned flags) {
  return enter(Needs::kNothing, "cuInit", [&](State& all, auto&) {
    if (flags != 0) return refuse(cuda::kInvalidValue, "cuInit: flags must be 0");
    if (all.initialized) return CUresult{cuda::kSuccess};
    read_config(all.config);
    constexpr CUresult kNoDevice = 100;
    if (all.config.fail_init) return refuse(kNoDevice, "cuInit: SIMGPU_FAULT=init");
    all.memory.page = all.config.granularity;
    all.memory.computing = all.config.devices;
    all.memory.limits[static_cast<int>(Store::kDevice)] = all.config.memory;
    all.memory.limits[static_cast<int>(Store::kPeer)] = all.config.devices > 1 ? all.config.memory : 0;
    const CUresult failed = all.memory.mappings.open();
    if (failed != cuda::kSuccess) return failed;
    Trace().take();  // the first one loads a library, which must not happen later under a lock
    ::pthread_atfork(before_fork, after_fork, in_child);
    all.initialized = true;
    return CUresult{cuda::kSuccess};
  });
}

CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  return enter(Needs::kInit, "cuDevicePrimaryCtxRetain", [&](State& all, auto&) {
    const CUresult refused = check_device(all, device, "cuDevicePrimaryCtxRetain");
    if (refused != cuda::kSuccess) return refused;
    if (all.contexts[device].retained++ == 0) ++all.contexts[device].serial;
    *context = primary(all, device);
    return CUresult{cuda::kSuccess};
  });
}

// The last release waits for all work and takes the streams and events with it; memory stays.
CUresult cuDevicePrimaryCtxRelease(CUdevice device) {
  return enter(Needs::kInit, "cuDevicePrimaryCtxRelease", [&](State& all, auto& lock) {
    const CUresult refused = check_device(all, device, "cuDevicePrimaryCtxRelease");
    if (refused != cuda::kSuccess) return refused;
    State::Context& context = all.contexts[device];
    if (context.retained == 0) return refuse(cuda::kInvalidContext, "cuDevicePrimaryCtxRelease: it is not retained");
    if (--context.retained > 0) return CUresult{cuda::kSuccess};
    all.engine.wait_for_all(lock, device);
    const auto streams = all.engine.streams();
    for (const auto& [handle, stream] : streams) {
      if (stream->device == device) all.engine.destroy(stream);
    }
    for (auto event = all.events.begin(); event != all.events.end();) {
      event = event->second.device == device ? all.events.erase(event) : std::next(event);
    }
    if (device == 0) all.watch.registered.clear();
    return CUresult{cuda::kSuccess};
  });
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) {
  return enter(Needs::kInit, "cuDevicePrimaryCtxGetState", [&](State& all, auto&) {
    const CUresult refused = check_device(all, device, "cuDevicePrimaryCtxGetState");
    if (refused != cuda::kSuccess) return refused;
    *flags = 0;
    *active = all.contexts[device].retained > 0;
    return CUresult{cuda::kSuccess};
  });
}

CUresult cuCtxSetCurrent(CUcontext context) {
  return enter(Needs::kInit, "cuCtxSetCurrent", [&](State& all, auto&) {
    if (context != nullptr && !alive(all, context)) {
      return refuse(cuda::kInvalidContext, "cuCtxSetCurrent: %p is no retained context", static_cast<void*>(context));
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

CUresult cuCtxGetDevice(CUdevice* device) {
  return enter(Needs::kInit, "cuCtxGetDevice", [&](State&, auto&) {
    *device = current_device();
    return CUresult{*device < 0 ? cuda::kInvalidContext : cuda::kSuccess};
  });
}

int simgpu_synchronize_for(void* stream, const char* why) {
  static_cast<void>(why);  // seen in a debugger and in traces of calls
  return cuStreamSynchronize(static_cast<CUstream>(stream));
}

void simgpu_counts(SimCounts* counts) {
  Lock lock(state().mutex);
  *counts = state().counts;
}

void simgpu_report(char* text, std::size_t capacity) {
  Lock lock(state().mutex);
  if (capacity > 0) std::snprintf(text, capacity, "%s", state().newest_report.c_str());
}

std::size_t simgpu_graphs_using(std::uint64_t address, std::uint64_t size, std::size_t* operations) {
  Lock lock(state().mutex);
  std::size_t all = 0, using_it = 0;
  for (const auto& [handle, executable] : state().executables) {
    for (const Node& node : executable->graph->nodes) {
      if (node.work == nullptr) continue;
      ++all;
      const auto& ranges = node.work->ranges;
      using_it += std::any_of(ranges.begin(), ranges.end(), [&](const Range& one) {
        return one.size > 0 && one.address < address + size && address < one.address + one.size;
      });
    }
  }
  if (operations != nullptr) *operations = all;
  return using_it;
}

void simgpu_set_delay(std::uint64_t ns) { state().config.delay_ns = ns; }

void simgpu_note(const char* text) {
  Lock lock(state().mutex);
  write_report(state(), text, false);
}

void simgpu_hold(int hold) {
  Lock lock(state().mutex);
  state().engine.hold(hold != 0);
}
