// The one state of the simulated device, behind one lock, and how every entry point gets in.
#pragma once

#include <map>
#include <memory>
#include <set>
#include <unordered_map>
#include <vector>

#include "capture.h"
#include "config.h"
#include "engine.h"
#include "memory.h"
#include "results.h"
#include "simgpu.h"
#include "watch.h"

namespace simgpu {

namespace cuda = ballonet::cuda;
using ballonet::standin::refuse;
using ballonet::standin::Run;
using ballonet::standin::Store;

struct Event {
  int device = 0;
  bool timed = false;
  OperationPtr record;               // the newest; null before the first
  std::shared_ptr<Capture> capture;  // where the newest was captured
  std::vector<const Node*> frontier;
};

struct State {
  std::mutex mutex;
  Config config;
  bool initialized = false, forked = false;
  CUresult dead = cuda::kSuccess;  // else what every call answers

  ballonet::standin::Memory memory;
  Watch watch;
  std::map<std::uint64_t, Allocation> allocations;  // made by cuMemAlloc
  Engine engine{*this};
  SimCounts counts{};
  std::uint64_t creates = 0;
  std::string newest_report;
  bool noted_kind = false;

  struct Context {
    unsigned retained = 0;
    std::uint64_t serial = 0;  // changes when a new one is made
  } contexts[ballonet::standin::kDevices];
  std::unordered_map<CUevent, Event> events;
  std::set<std::shared_ptr<Capture>> captures;  // that are under way
  std::unordered_map<void*, std::shared_ptr<Graph>> graphs;
  std::unordered_map<void*, std::shared_ptr<Executable>> executables;
  std::uint64_t next_handle = 1;

  std::vector<std::shared_ptr<void>> garbage;  // destroyed once the lock is released: it may call back
};

State& state();  // made on first use, never destroyed

enum class Needs { kNothing, kInit, kContext, kSafe };  // kSafe: a context, and no capture that forbids the call

CUresult admit(State& all, Needs needs, const char* function);
int current_device();  // of this thread's context; -1 without
void write_report(State& all, const std::string& text, bool violation);

// Runs `body(state, lock)` under the lock if `function` may be called now. No exception leaves.
template <class Body>
CUresult enter(Needs needs, const char* function, Body body) noexcept {
  std::vector<std::shared_ptr<void>> garbage;
  try {
    State& all = state();
    Lock lock(all.mutex);
    CUresult result = admit(all, needs, function);
    if (result == cuda::kSuccess) result = body(all, lock);
    garbage.swap(all.garbage);
    return result;
  } catch (const std::bad_alloc&) {
    return refuse(cuda::kOutOfMemory, "%s: the process is out of memory", function);
  } catch (const std::exception& error) {
    return refuse(cuda::kUnknown, "%s: %s", function, error.what());
  }
}

// Calls body(stream) with the stream behind a handle.
template <class Body>
CUresult with_stream(State& all, CUstream handle, const char* function, Body body) {
  const StreamPtr stream = all.engine.find(handle, current_device());
  if (stream != nullptr) return body(stream);
  return refuse(cuda::kInvalidHandle, "%s: %p is no stream, or was destroyed", function, static_cast<void*>(handle));
}

// Queues work to a stream, or records it where the stream is captured.
CUresult submit(State& all, Lock& lock, const StreamPtr& stream, const std::shared_ptr<Work>& work);

}  // namespace simgpu

#include "driver_more.h"
