// Entry points for streams, events and what is queued to them.
#include <algorithm>
#include <cstring>

#include "state.h"

using namespace simgpu;

namespace {

constexpr unsigned kExternal = 1;  // an event's record or wait becomes a node of the graph
constexpr CUresult kUnsupported = 900;

// Calls body(event) with the event behind a handle.
template <class Body>
CUresult with_event(State& all, CUevent handle, const char* function, Body body) {
  const auto found = all.events.find(handle);
  if (found != all.events.end()) return body(found->second);
  return refuse(cuda::kInvalidHandle, "%s: %p is no event, or was destroyed", function, static_cast<void*>(handle));
}

// The host waits; what it waits for may have killed the device.
CUresult wait(State& all, Lock& lock, const OperationPtr& operation) {
  ++all.counts.synchronizations;
  all.engine.wait(lock, operation);
  return all.dead;
}

// Refuses to ask after, or wait for, a stream that is captured.
CUresult check_free(State& all, const StreamPtr& stream, const char* function) {
  if (stream->capture) return break_capture(stream->capture, kUnsupported, function, "the stream is captured");
  const CUresult refused = check_legacy(all, *stream, function);
  return refused == cuda::kSuccess ? check_safe(all, function) : refused;
}

CUresult check_free(State& all, const Event& event, const char* function) {
  if (event.capture) {
    return break_capture(event.capture, cuda::kCapturedEvent, function, "the event was recorded in a captured stream");
  }
  return check_safe(all, function);
}

}  // namespace

CUresult cuStreamCreateWithPriority(CUstream* handle, unsigned flags, int priority) {
  return enter(Needs::kContext, "cuStreamCreate", [&](State& all, auto&) {
    if ((flags & ~cuda::kStreamNonBlocking) != 0)
      return refuse(cuda::kInvalidValue, "cuStreamCreate: unknown flags %#x", flags);
    const bool blocking = (flags & cuda::kStreamNonBlocking) == 0;
    *handle = all.engine.create(current_device(), blocking, std::clamp(priority, -5, 0))->handle;
    return CUresult{cuda::kSuccess};
  });
}

CUresult cuStreamCreate(CUstream* handle, unsigned flags) { return cuStreamCreateWithPriority(handle, flags, 0); }

CUresult cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cuda::kSuccess;
}

CUresult cuStreamGetPriority(CUstream handle, int* priority) {
  return enter(Needs::kContext, "cuStreamGetPriority", [&](State& all, auto&) {
    return with_stream(all, handle, "cuStreamGetPriority", [&](const StreamPtr& stream) {
      *priority = stream->priority;
      return CUresult{cuda::kSuccess};
    });
  });
}

// Returns at once; what was queued is still carried out.
CUresult cuStreamDestroy(CUstream handle) {
  return enter(Needs::kContext, "cuStreamDestroy", [&](State& all, auto&) {
    const auto found = all.engine.streams().find(handle);
    if (found == all.engine.streams().end())
      return refuse(cuda::kInvalidHandle, "cuStreamDestroy: %p is no stream", static_cast<void*>(handle));
    const StreamPtr stream = found->second;
    if (stream->capture) break_capture(stream->capture, kUnsupported, "cuStreamDestroy", "the stream is captured");
    all.engine.destroy(stream);
    return CUresult{cuda::kSuccess};
  });
}

CUresult cuStreamSynchronize(CUstream handle) {
  return enter(Needs::kContext, "cuStreamSynchronize", [&](State& all, auto& lock) {
    return with_stream(all, handle, "cuStreamSynchronize", [&](const StreamPtr& stream) {
      const CUresult refused = check_free(all, stream, "cuStreamSynchronize");
      return refused != cuda::kSuccess ? refused : wait(all, lock, all.engine.mark(lock, stream));
    });
  });
}

CUresult cuStreamQuery(CUstream handle) {
  return enter(Needs::kContext, "cuStreamQuery", [&](State& all, auto&) {
    return with_stream(all, handle, "cuStreamQuery", [&](const StreamPtr& stream) {
      const CUresult refused = check_free(all, stream, "cuStreamQuery");
      if (refused != cuda::kSuccess) return refused;
      return CUresult{all.engine.idle(*stream) ? cuda::kSuccess : cuda::kNotReady};
    });
  });
}

CUresult cuCtxSynchronize() {
  return enter(Needs::kSafe, "cuCtxSynchronize", [&](State& all, auto& lock) {
    ++all.counts.synchronizations;
    all.engine.wait_for_all(lock, current_device());
    return all.dead;
  });
}

CUresult cuStreamWaitEvent(CUstream handle, CUevent number, unsigned flags) {
  return enter(Needs::kContext, "cuStreamWaitEvent", [&](State& all, auto&) {
    return with_event(all, number, "cuStreamWaitEvent", [&](Event& event) {
      return with_stream(all, handle, "cuStreamWaitEvent", [&](const StreamPtr& stream) {
        if ((flags & ~kExternal) != 0) return refuse(cuda::kInvalidValue, "cuStreamWaitEvent: unknown flags");
        if (stream->capture || event.capture)
          return wait_captured(all, event, number, stream, (flags & kExternal) != 0);
        const CUresult refused = check_legacy(all, *stream, "cuStreamWaitEvent");
        if (refused != cuda::kSuccess) return refused;
        if (event.record != nullptr && !event.record->done) stream->awaits.push_back(event.record);
        return CUresult{cuda::kSuccess};
      });
    });
  });
}

CUresult cuEventCreate(CUevent* handle, unsigned flags) {
  return enter(Needs::kContext, "cuEventCreate", [&](State& all, auto&) {
    constexpr unsigned kBlockingSync = 1, kInterprocess = 4;
    if ((flags & ~(kBlockingSync | cuda::kEventDisableTiming)) != 0) {
      return refuse((flags & kInterprocess) != 0 ? cuda::kNotSupported : cuda::kInvalidValue,
                    "cuEventCreate: flags %#x", flags);
    }
    constexpr std::uintptr_t kBase = 0xe0000000000;  // no address of anything: an event is never followed
    *handle = reinterpret_cast<CUevent>(kBase + all.next_handle++ * 16);
    Event& event = all.events[*handle];
    event.device = current_device();
    event.timed = (flags & cuda::kEventDisableTiming) == 0;
    return CUresult{cuda::kSuccess};
  });
}

CUresult cuEventDestroy(CUevent handle) {
  return enter(Needs::kContext, "cuEventDestroy", [&](State& all, auto&) {
    return with_event(all, handle, "cuEventDestroy", [&](Event& event) {
      all.garbage.push_back(std::move(event.capture));
      all.events.erase(handle);
      return CUresult{cuda::kSuccess};
    });
  });
}

CUresult cuEventRecordWithFlags(CUevent number, CUstream handle, unsigned flags) {
  return enter(Needs::kContext, "cuEventRecord", [&](State& all, auto& lock) {
    return with_event(all, number, "cuEventRecord", [&](Event& event) {
      return with_stream(all, handle, "cuEventRecord", [&](const StreamPtr& stream) {
        if ((flags & ~kExternal) != 0) return refuse(cuda::kInvalidValue, "cuEventRecord: unknown flags %#x", flags);
        if (stream->device != event.device)
          return refuse(cuda::kInvalidHandle, "cuEventRecord: the event is of device %d and the stream of device %d",
                        event.device, stream->device);
        if (stream->capture) return record_captured(all, event, number, stream, (flags & kExternal) != 0);
        const CUresult refused = check_legacy(all, *stream, "cuEventRecord");
        if (refused != cuda::kSuccess) return refused;
        const OperationPtr mark = all.engine.mark(lock, stream);
        const auto still = all.events.find(number);  // the lock may have been released
        if (still == all.events.end()) return CUresult{cuda::kSuccess};
        all.garbage.push_back(std::move(still->second.capture));
        still->second.capture = nullptr;
        still->second.record = mark;
        return CUresult{cuda::kSuccess};
      });
    });
  });
}

CUresult cuEventRecord(CUevent event, CUstream stream) { return cuEventRecordWithFlags(event, stream, 0); }

CUresult cuEventQuery(CUevent handle) {
  return enter(Needs::kContext, "cuEventQuery", [&](State& all, auto&) {
    return with_event(all, handle, "cuEventQuery", [&](Event& event) {
      const CUresult refused = check_free(all, event, "cuEventQuery");
      if (refused != cuda::kSuccess) return refused;
      return CUresult{event.record == nullptr || event.record->done ? cuda::kSuccess : cuda::kNotReady};
    });
  });
}

CUresult cuEventSynchronize(CUevent handle) {
  return enter(Needs::kContext, "cuEventSynchronize", [&](State& all, auto& lock) {
    return with_event(all, handle, "cuEventSynchronize", [&](Event& event) {
      const CUresult refused = check_free(all, event, "cuEventSynchronize");
      if (refused != cuda::kSuccess || event.record == nullptr) return refused;
      return wait(all, lock, OperationPtr(event.record));
    });
  });
}

CUresult cuEventElapsedTime(float* ms, CUevent from, CUevent to) {
  return enter(Needs::kContext, "cuEventElapsedTime", [&](State& all, auto&) {
    return with_event(all, from, "cuEventElapsedTime", [&](Event& first) {
      return with_event(all, to, "cuEventElapsedTime", [&](Event& last) {
        if (!first.timed || !last.timed || first.record == nullptr || last.record == nullptr)
          return refuse(cuda::kInvalidHandle, "cuEventElapsedTime: an event without timing, or never recorded");
        if (!first.record->done || !last.record->done) return CUresult{cuda::kNotReady};
        *ms = static_cast<float>(last.record->ended_ns - first.record->ended_ns) / 1e6f;
        return CUresult{cuda::kSuccess};
      });
    });
  });
}

namespace {

CUresult queue(CUstream handle, const std::shared_ptr<Work>& work) {
  return enter(Needs::kContext, work->name.c_str(), [&](State& all, auto& lock) {
    return with_stream(all, handle, work->name.c_str(),
                       [&](const StreamPtr& stream) { return submit(all, lock, stream, work); });
  });
}

}  // namespace

CUresult cuLaunchHostFunc(CUstream handle, SimHostFunction function, void* context) {
  const auto work = std::make_shared<Work>();
  work->name = "cuLaunchHostFunc";
  work->run = [function, context] { return function(context), true; };
  return queue(handle, work);
}

void simgpu_fail(const char* why) { fail(why); }

int simgpu_launch(void* handle, const char* name, void (*run)(void*), void (*drop)(void*), void* context,
                  const SimRange* ranges, std::size_t count) {
  const auto work = std::make_shared<Work>();
  work->name = name;
  for (std::size_t i = 0; i < count; ++i) {
    work->ranges.push_back(Range{ranges[i].address, ranges[i].size, ranges[i].write != 0});
  }
  work->run = [run, context] { return run(context), true; };
  work->drop = drop;
  work->context = context;
  work->kernel = true;
  return queue(static_cast<CUstream>(handle), work);
}
