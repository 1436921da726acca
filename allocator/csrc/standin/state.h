// The one state of the stand-in, behind one lock, and how every entry point gets in.
//
// Guarantees: no exception leaves an entry point; in the child of a fork each refuses.
//
// Lock: `mutex`, which `enter` takes for the whole of a call.
#pragma once

#include <memory>
#include <mutex>
#include <new>
#include <unordered_map>
#include <utility>

#include "engine.h"
#include "memory.h"
#include "order.h"
#include "registered.h"
#include "results.h"

namespace ballonet::standin {

struct State {
  std::mutex mutex;
  bool initialized = false;
  bool forked = false;  // this is the child of a fork: everything is refused

  Memory memory;
  Mappings& mappings = memory.mappings;
  Order order;
  Engine engine{mutex};
  Registered registered;  // goes with the context

  unsigned retained = 0;             // of the primary context
  std::uint64_t context_serial = 0;  // changes when a new one is made
  std::shared_ptr<Stream> null_stream = std::make_shared<Stream>();
  std::unordered_map<CUstream, std::shared_ptr<Stream>> streams;
  std::unordered_map<CUevent, std::shared_ptr<Marker>> events;  // the marker is null until it is recorded
  std::uint64_t next_event = 1;
};

State& state();  // made on first use, never destroyed: threads may outlive the program's destructors
CUresult check_known(CUdevice device, const char* function);
// Is it the one that computes?
CUresult check_device(CUdevice device, const char* function);

enum class Needs { kNothing, kInit, kContext };

// Success where `function` may be called now by this thread.
CUresult admit(const State& state, Needs needs, const char* function);

// Runs `body(state, lock)` under the lock if `function` may be called now. No exception leaves.
template <class Body>
CUresult enter(Needs needs, const char* function, Body body) noexcept {
  try {
    State& all = state();
    std::unique_lock<std::mutex> lock(all.mutex);
    const CUresult refused = admit(all, needs, function);
    return refused != cuda::kSuccess ? refused : body(all, lock);
  } catch (const std::bad_alloc&) {
    return refuse(cuda::kOutOfMemory, "%s: the process is out of memory", function);
  } catch (const std::exception& error) {
    return refuse(cuda::kUnknown, "%s: %s", function, error.what());
  }
}

// fork.cpp: what a fork does to both sides; once per process.
CUresult watch_forks();

}  // namespace ballonet::standin

// Every symbol of the ABI, with the driver's own name and exported.
#define BALLONET_EXPORT(name, symbol, ...) \
  extern "C" __attribute__((visibility("default"))) CUresult name(__VA_ARGS__) __asm__(symbol);
BALLONET_DRIVER_FUNCTIONS(BALLONET_EXPORT)
BALLONET_STANDIN_FUNCTIONS(BALLONET_EXPORT)
#undef BALLONET_EXPORT
