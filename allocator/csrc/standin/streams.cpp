// Entry points for streams, events and what moves bytes.
#include <algorithm>
#include <cstdint>

#include "state.h"

using namespace ballonet::standin;
namespace cuda = ballonet::cuda;

namespace {

using ull = unsigned long long;
using Lock = std::unique_lock<std::mutex>;

thread_local int capture_mode = 0;  // CU_STREAM_CAPTURE_MODE_GLOBAL

ull number(const void* handle) { return reinterpret_cast<std::uintptr_t>(handle); }

// Calls body(stream) with the stream behind a handle.
template <class Body>
CUresult with_stream(State& all, CUstream handle, const char* function, Body body) {
  if (handle == nullptr) return body(all.null_stream);
  const auto found = all.streams.find(handle);
  if (found != all.streams.end()) return body(std::shared_ptr<Stream>(found->second));
  return refuse(cuda::kInvalidHandle, "%s: %#llx is no stream, or was destroyed", function, number(handle));
}

// Calls body(marker) with a reference to the newest record of an event.
template <class Body>
CUresult with_event(State& all, CUevent handle, const char* function, Body body) {
  const auto found = all.events.find(handle);
  if (found != all.events.end()) return body(found->second);
  return refuse(cuda::kInvalidHandle, "%s: %#llx is no event, or was destroyed", function, number(handle));
}

std::shared_ptr<Marker> mark(State& all, const std::shared_ptr<Stream>& stream) {
  return all.engine.mark(stream, all.order.publish(stream->index));
}

// What the caller is told of a copy that failed.
CUresult report(const char* function, const std::optional<Failure>& failure) {
  if (!failure) return cuda::kSuccess;
  return refuse(cuda::kIllegalAddress,
                "%s: a copy from the registered memory [%#llx, +%llu) found part of it gone when it was due (is the "
                "file that is mapped there shorter?), and brought nothing",
                function, ull{failure->source}, ull{failure->size});
}

CUresult wait(State& all, Lock& lock, const char* function, const std::shared_ptr<Marker>& marker) {
  all.engine.wait(lock, marker);
  all.order.join_host(marker->clock);
  return report(function, marker->failure);
}

// A range that touches host memory anywhere counts as host memory.
bool on_host(const std::vector<Run>& runs) {
  return std::any_of(runs.begin(), runs.end(), [](const Run& run) { return !on_device(run.store); });
}

// Pages of several places behind one side of a copy: a driver tells from the address at which it begins
// what it is a copy of, and nothing says what CUDA does where the rest is something else.
bool mixed(const std::vector<Run>& runs) {
  return std::any_of(runs.begin(), runs.end(), [&](const Run& run) { return run.store != runs.front().store; });
}

Link link_between(const std::vector<Run>& source, const std::vector<Run>& destination) {
  const bool from_peer = source.front().store == Store::kPeer, to_peer = destination.front().store == Store::kPeer;
  if (on_host(source) != on_host(destination)) return on_host(source) ? Link::kToDevice : Link::kToHost;
  if (from_peer == to_peer) return Link::kNone;
  return from_peer ? Link::kFromPeer : Link::kToPeer;
}

// `told`: does the function say which of the two addresses is the device's? Where it does not a driver may have the CPU
// copy from host to host.
CUresult copy(State& all, Lock& lock, const char* function, std::uint64_t to, std::uint64_t from, std::uint64_t size,
              const std::shared_ptr<Stream>& stream, bool told) {
  if (size == 0) return cuda::kSuccess;
  auto op = std::make_unique<Op>();
  op->kind = Op::kCopy;
  op->destination = reinterpret_cast<char*>(to);
  op->source = reinterpret_cast<const char*>(from);
  op->size = size;
  CUresult refused = all.mappings.locate(to, size, cuda::kInvalidValue, function, &op->writes);
  if (refused == cuda::kSuccess) refused = all.mappings.locate(from, size, cuda::kInvalidValue, function, &op->reads);
  if (refused != cuda::kSuccess) return refused;
  if (mixed(op->reads) || mixed(op->writes)) {
    return refuse(cuda::kInvalidValue, "%s: %#llx to %#llx: one side spans pages of several places", function,
                  ull{from}, ull{to});
  }
  const bool for_cpu = all.mappings.open_for_cpu(from, size) && all.mappings.open_for_cpu(to, size);
  if (!told && on_host(op->reads) && on_host(op->writes) && !for_cpu) {
    return refuse(
        cuda::kIllegalAddress,
        "%s: a copy from host memory to host memory, %#llx to %#llx, of which the CPU may not use all (give it "
        "access, too)",
        function, ull{from}, ull{to});
  }
  bool target_registered = false;
  refused = all.registered.may_copy(function, from, size, false, &op->registered);
  if (refused == cuda::kSuccess) refused = all.registered.may_copy(function, to, size, true, &target_registered);
  if (refused != cuda::kSuccess) return refused;
  if (overlap(op->reads, op->writes)) {
    return refuse(cuda::kInvalidValue, "%s: source %#llx and destination %#llx share bytes", function, ull{from},
                  ull{to});
  }
  const Use uses[] = {{from, size, &op->reads, false}, {to, size, &op->writes, true}};
  refused = all.order.submit(function, stream->index, uses, 2);
  if (refused != cuda::kSuccess) return refused;
  op->link = link_between(op->reads, op->writes);
  return report(function, all.engine.submit(lock, stream, std::move(op)));
}

// Refuses what is not memory of the device's address space.
CUresult check_reserved(State& all, std::uint64_t address, std::uint64_t size, const char* function) {
  std::vector<Run> runs;
  const CUresult refused = all.mappings.locate(address, size, cuda::kInvalidValue, function, &runs);
  if (refused != cuda::kSuccess || runs.front().store != Store::kPlain) return refused;
  return refuse(cuda::kInvalidValue, "%s: %#llx is no address of the device", function, ull{address});
}

}  // namespace

CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, std::size_t size, CUstream handle) {
  return enter(Needs::kContext, "cuMemcpyAsync", [&](State& all, auto& lock) {
    return with_stream(all, handle, "cuMemcpyAsync", [&](const std::shared_ptr<Stream>& stream) {
      return copy(all, lock, "cuMemcpyAsync", to, from, size, stream, false);
    });
  });
}

// As on CUDA, the host may reuse the source on return, but has not waited for the bytes to arrive.
CUresult cuMemcpyHtoD(CUdeviceptr to, const void* from, std::size_t size) {
  return enter(Needs::kContext, "cuMemcpyHtoD", [&](State& all, auto& lock) {
    const CUresult refused = check_reserved(all, to, size, "cuMemcpyHtoD");
    return refused != cuda::kSuccess ? refused
                                     : copy(all, lock, "cuMemcpyHtoD", to, number(from), size, all.null_stream, true);
  });
}

// The host has waited for stream 0 when this returns.
CUresult cuMemcpyDtoH(void* to, CUdeviceptr from, std::size_t size) {
  return enter(Needs::kContext, "cuMemcpyDtoH", [&](State& all, auto& lock) {
    CUresult refused = check_reserved(all, from, size, "cuMemcpyDtoH");
    if (refused == cuda::kSuccess)
      refused = copy(all, lock, "cuMemcpyDtoH", number(to), from, size, all.null_stream, true);
    return refused != cuda::kSuccess ? refused : wait(all, lock, "cuMemcpyDtoH", mark(all, all.null_stream));
  });
}

CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, std::size_t size, CUstream handle) {
  return enter(Needs::kContext, "cuMemsetD8Async", [&](State& all, auto& lock) {
    return with_stream(all, handle, "cuMemsetD8Async", [&](const std::shared_ptr<Stream>& stream) {
      if (size == 0) return CUresult{cuda::kSuccess};
      CUresult refused = check_reserved(all, to, size, "cuMemsetD8Async");
      if (refused != cuda::kSuccess) return refused;
      auto op = std::make_unique<Op>();
      op->kind = Op::kFill;
      op->destination = reinterpret_cast<char*>(to);
      op->size = size;
      op->value = value;
      refused = all.mappings.locate(to, size, cuda::kInvalidValue, "cuMemsetD8Async", &op->writes);
      if (refused == cuda::kSuccess) refused = all.mappings.fillable(to, size, op->writes, "cuMemsetD8Async");
      if (refused != cuda::kSuccess) return refused;
      const Use use{to, size, &op->writes, true};
      refused = all.order.submit("cuMemsetD8Async", stream->index, &use, 1);
      return refused != cuda::kSuccess ? refused
                                       : report("cuMemsetD8Async", all.engine.submit(lock, stream, std::move(op)));
    });
  });
}

CUresult ballonet_standin_use(CUdeviceptr address, std::size_t size, CUstream handle, int write) {
  return enter(Needs::kInit, "ballonet_standin_use", [&](State& all, auto&) {
    return with_stream(all, handle, "ballonet_standin_use", [&](const std::shared_ptr<Stream>& stream) {
      if (size == 0) return CUresult{cuda::kSuccess};
      std::vector<Run> runs;
      const CUresult refused = all.mappings.locate(address, size, cuda::kIllegalAddress, "ballonet_standin_use", &runs);
      if (refused != cuda::kSuccess) return refused;
      const Use use{address, size, &runs, write != 0};
      return all.order.submit("ballonet_standin_use", stream->index, &use, 1);
    });
  });
}

CUresult cuStreamCreate(CUstream* handle, unsigned flags) {
  return enter(Needs::kContext, "cuStreamCreate", [&](State& all, auto&) {
    if ((flags & ~cuda::kStreamNonBlocking) != 0)
      return refuse(cuda::kInvalidValue, "cuStreamCreate: unknown flags %#x", flags);
    auto stream = std::make_shared<Stream>();
    stream->index = all.order.add_stream();
    *handle = stream_handle(stream->index);
    all.streams[*handle] = std::move(stream);
    return CUresult{cuda::kSuccess};
  });
}

// Returns at once; what was submitted is still carried out.
CUresult cuStreamDestroy(CUstream handle) {
  return enter(Needs::kContext, "cuStreamDestroy", [&](State& all, auto&) {
    if (all.streams.erase(handle) == 1) return CUresult{cuda::kSuccess};
    return refuse(cuda::kInvalidHandle, "cuStreamDestroy: %#llx is no stream, or was destroyed before", number(handle));
  });
}

CUresult cuStreamSynchronize(CUstream handle) {
  return enter(Needs::kContext, "cuStreamSynchronize", [&](State& all, auto& lock) {
    return with_stream(all, handle, "cuStreamSynchronize", [&](const std::shared_ptr<Stream>& stream) {
      return wait(all, lock, "cuStreamSynchronize", mark(all, stream));
    });
  });
}

CUresult cuCtxSynchronize() {
  return enter(Needs::kContext, "cuCtxSynchronize", [&](State& all, auto& lock) {
    const Clock now = all.order.publish_all();
    std::optional<Failure> failure = all.engine.drain(lock);
    all.order.join_host(now);
    for (const auto& [handle, stream] : all.streams) {
      const auto untold = std::exchange(stream->failure, std::nullopt);
      if (!failure) failure = untold;
    }
    return report("cuCtxSynchronize", failure);
  });
}

CUresult cuStreamWaitEvent(CUstream handle, CUevent event, unsigned flags) {
  return enter(Needs::kContext, "cuStreamWaitEvent", [&](State& all, auto& lock) {
    return with_event(all, event, "cuStreamWaitEvent", [&](std::shared_ptr<Marker> marker) {
      return with_stream(all, handle, "cuStreamWaitEvent", [&](const std::shared_ptr<Stream>& stream) {
        if (flags != 0) return refuse(cuda::kInvalidValue, "cuStreamWaitEvent: flags must be 0");
        if (marker == nullptr) return CUresult{cuda::kSuccess};  // never recorded: nothing to wait for
        if (stream->index == 0) {
          all.engine.wait(lock, marker);
        } else {
          all.engine.wait_for(stream, marker);
        }
        all.order.join_stream(stream->index, marker->clock);
        return stream->index == 0 ? report("cuStreamWaitEvent", marker->failure) : CUresult{cuda::kSuccess};
      });
    });
  });
}

CUresult cuStreamIsCapturing(CUstream handle, int* status) {
  return enter(Needs::kContext, "cuStreamIsCapturing", [&](State& all, auto&) {
    return with_stream(all, handle, "cuStreamIsCapturing", [&](const std::shared_ptr<Stream>&) {
      *status = cuda::kCaptureNone;
      return CUresult{cuda::kSuccess};
    });
  });
}

CUresult cuThreadExchangeStreamCaptureMode(int* mode) {
  return enter(Needs::kInit, "cuThreadExchangeStreamCaptureMode", [&](State&, auto&) {
    if (*mode < 0 || *mode > cuda::kCaptureModeRelaxed) {
      return refuse(cuda::kInvalidValue, "cuThreadExchangeStreamCaptureMode: %d is no mode", *mode);
    }
    std::swap(capture_mode, *mode);
    return CUresult{cuda::kSuccess};
  });
}

CUresult cuEventCreate(CUevent* event, unsigned flags) {
  return enter(Needs::kContext, "cuEventCreate", [&](State& all, auto&) {
    constexpr unsigned kBlockingSync = 1;
    if ((flags & ~(kBlockingSync | cuda::kEventDisableTiming)) != 0) {
      return refuse(cuda::kInvalidValue, "cuEventCreate: unknown flags %#x", flags);
    }
    constexpr std::uintptr_t kBase = 0xe0000000000;  // no address of anything: an event is never followed
    *event = reinterpret_cast<CUevent>(kBase + all.next_event++ * 16);
    all.events[*event] = nullptr;
    return CUresult{cuda::kSuccess};
  });
}

CUresult cuEventDestroy(CUevent event) {
  return enter(Needs::kContext, "cuEventDestroy", [&](State& all, auto&) {
    if (all.events.erase(event) == 1) return CUresult{cuda::kSuccess};
    return refuse(cuda::kInvalidHandle, "cuEventDestroy: %#llx is no event, or was destroyed before", number(event));
  });
}

CUresult cuEventRecord(CUevent event, CUstream handle) {
  return enter(Needs::kContext, "cuEventRecord", [&](State& all, auto&) {
    return with_event(all, event, "cuEventRecord", [&](std::shared_ptr<Marker>& newest) {
      return with_stream(all, handle, "cuEventRecord", [&](const std::shared_ptr<Stream>& stream) {
        newest = mark(all, stream);
        return CUresult{cuda::kSuccess};
      });
    });
  });
}

CUresult cuEventQuery(CUevent event) {
  return enter(Needs::kContext, "cuEventQuery", [&](State& all, auto&) {
    return with_event(all, event, "cuEventQuery", [&](const std::shared_ptr<Marker>& marker) {
      if (marker != nullptr && !marker->reached) return CUresult{cuda::kNotReady};
      if (marker == nullptr) return CUresult{cuda::kSuccess};
      all.order.join_host(marker->clock);
      return report("cuEventQuery", marker->failure);
    });
  });
}

CUresult cuEventSynchronize(CUevent event) {
  return enter(Needs::kContext, "cuEventSynchronize", [&](State& all, auto& lock) {
    return with_event(all, event, "cuEventSynchronize", [&](std::shared_ptr<Marker> marker) {
      return marker == nullptr ? CUresult{cuda::kSuccess} : wait(all, lock, "cuEventSynchronize", marker);
    });
  });
}
