#include "capture.h"

#include <algorithm>

#include "state.h"

namespace simgpu {
namespace {

constexpr CUresult kUnsupported = 900, kInvalidated = 901, kMerge = 902, kUnmatched = 903, kUnjoined = 904,
                   kIsolation = 905, kImplicit = 906, kCaptured = 907, kWrongThread = 908;

thread_local int capture_mode = kModeGlobal;

void leave(Stream& stream) {
  stream.capture = nullptr;
  stream.frontier.clear();
}

void join(std::vector<const Node*>& into, const std::vector<const Node*>& from) {
  for (const Node* node : from) {
    if (std::find(into.begin(), into.end(), node) == into.end()) into.push_back(node);
  }
}

// Is every node before one of `frontier`?
bool all_joined(const Graph& graph, const std::vector<const Node*>& frontier) {
  std::set<const Node*> reached(frontier.begin(), frontier.end());
  for (auto node = graph.nodes.rbegin(); node != graph.nodes.rend(); ++node) {
    if (reached.count(&*node) == 0) return false;
    reached.insert(node->after.begin(), node->after.end());
  }
  return true;
}

// The nodes in an order that their dependencies admit: as they were captured, or any one.
std::vector<const Node*> ordered(State& all, const Graph& graph, Stream& stream) {
  std::vector<const Node*> left, order;
  for (const Node& node : graph.nodes) left.push_back(&node);
  if (all.config.seed == 0) return left;
  std::set<const Node*> queued;
  while (!left.empty()) {
    std::vector<std::size_t> ready;
    for (std::size_t i = 0; i < left.size(); ++i) {
      const auto& after = left[i]->after;
      if (std::all_of(after.begin(), after.end(), [&](const Node* one) { return queued.count(one) > 0; }))
        ready.push_back(i);
      if (ready.size() == 8) break;  // enough of a choice, and a long graph stays quick
    }
    const std::size_t chosen = ready[all.engine.random(stream) % ready.size()];
    order.push_back(left[chosen]);
    queued.insert(left[chosen]);
    left.erase(left.begin() + static_cast<std::ptrdiff_t>(chosen));
  }
  return order;
}

void launch(State& all, Lock& lock, Executable& executable, const StreamPtr& stream) {
  if (executable.last != nullptr) stream->awaits.push_back(executable.last);
  for (const Node* node : ordered(all, *executable.graph, *stream)) {
    const auto awaited = all.events.find(node->awaited);
    if (awaited != all.events.end() && awaited->second.record) stream->awaits.push_back(awaited->second.record);
    if (node->work != nullptr) all.engine.submit(lock, stream, node->work);
    if (node->recorded == nullptr) continue;
    const OperationPtr mark = all.engine.mark(lock, stream);
    const auto recorded = all.events.find(node->recorded);
    if (recorded != all.events.end()) recorded->second.record = mark;
  }
  executable.last = all.engine.mark(lock, stream);
}

}  // namespace

CUresult break_capture(const std::shared_ptr<Capture>& capture, CUresult code, const char* function, const char* why) {
  capture->broken = true;
  return refuse(code, "%s: %s; the capture is invalid now", function, why);
}

CUresult add_node(const StreamPtr& stream, Node node, const char* function) {
  Capture& capture = *stream->capture;
  if (capture.broken) return refuse(kInvalidated, "%s: the capture is invalid", function);
  node.after = stream->frontier;
  capture.graph->nodes.push_back(std::move(node));
  stream->frontier = {&capture.graph->nodes.back()};
  return cuda::kSuccess;
}

CUresult check_safe(State& all, const char* function) {
  if (capture_mode == kModeRelaxed) return cuda::kSuccess;
  for (const auto& capture : all.captures) {
    const bool own = capture->thread == std::this_thread::get_id() && capture->mode != kModeRelaxed;
    const bool others = capture_mode == kModeGlobal && capture->mode == kModeGlobal;
    if (own || others) {
      return break_capture(capture, kUnsupported, function, "not permitted while a stream is captured");
    }
  }
  return cuda::kSuccess;
}

CUresult check_legacy(State& all, const Stream& stream, const char* function, bool only_asks) {
  if (!stream.legacy) return cuda::kSuccess;
  for (const auto& capture : all.captures) {
    for (const StreamPtr& one : capture->joined) {
      if (!one->blocking || one->device != stream.device) continue;
      if (only_asks) return refuse(kImplicit, "%s: a blocking stream is captured", function);
      return break_capture(capture, kImplicit, function, "the legacy stream would wait for a captured stream");
    }
  }
  return cuda::kSuccess;
}

CUresult record_captured(State& all, Event& event, CUevent handle, const StreamPtr& stream, bool external) {
  if (external) return add_node(stream, Node{nullptr, {}, handle, nullptr}, "cuEventRecord");
  if (stream->capture->broken) return refuse(kInvalidated, "cuEventRecord: the capture is invalid");
  all.garbage.push_back(std::move(event.capture));
  event.capture = stream->capture;
  event.frontier = stream->frontier;
  return cuda::kSuccess;
}

CUresult wait_captured(State& all, Event& event, CUevent handle, const StreamPtr& stream, bool external) {
  const char* const function = "cuStreamWaitEvent";
  if (external && stream->capture) return add_node(stream, Node{nullptr, {}, nullptr, handle}, function);
  if (event.capture == nullptr) {
    if (event.record == nullptr) return cuda::kSuccess;  // never recorded
    return break_capture(stream->capture, kIsolation, function, "a captured stream waits for an event outside");
  }
  if (all.captures.count(event.capture) == 0) return refuse(kCaptured, "%s: the event's capture is over", function);
  if (stream->capture == nullptr) {
    if (stream->legacy) return break_capture(event.capture, kImplicit, function, "the legacy stream cannot join");
    stream->capture = event.capture;
    stream->frontier = event.frontier;
    event.capture->joined.push_back(stream);
    return cuda::kSuccess;
  }
  if (stream->capture != event.capture) {
    stream->capture->broken = true;
    return break_capture(event.capture, kMerge, function, "two captures would become one");
  }
  join(stream->frontier, event.frontier);
  return cuda::kSuccess;
}

}  // namespace simgpu

using namespace simgpu;

CUresult cuThreadExchangeStreamCaptureMode(int* mode) {
  return enter(Needs::kInit, "cuThreadExchangeStreamCaptureMode", [&](State&, auto&) {
    if (*mode < 0 || *mode > kModeRelaxed) {
      return refuse(cuda::kInvalidValue, "cuThreadExchangeStreamCaptureMode: %d is no mode", *mode);
    }
    std::swap(capture_mode, *mode);
    return CUresult{cuda::kSuccess};
  });
}

CUresult cuStreamBeginCapture_v2(CUstream handle, int mode) {
  const char* const function = "cuStreamBeginCapture";
  return enter(Needs::kContext, function, [&](State& all, auto&) {
    return with_stream(all, handle, function, [&](const StreamPtr& stream) {
      if (mode < 0 || mode > kModeRelaxed) return refuse(cuda::kInvalidValue, "%s: %d is no mode", function, mode);
      if (stream->legacy) return refuse(kUnsupported, "%s: the legacy stream cannot be captured", function);
      if (stream->capture) return refuse(cuda::kIllegalState, "%s: the stream is captured already", function);
      auto capture = std::make_shared<Capture>();
      capture->origin = stream;
      capture->thread = std::this_thread::get_id();
      capture->mode = mode;
      capture->id = all.next_handle++;
      capture->joined.push_back(stream);
      stream->capture = capture;
      all.captures.insert(std::move(capture));
      return CUresult{cuda::kSuccess};
    });
  });
}

CUresult cuStreamEndCapture(CUstream handle, SimGraph* graph) {
  const char* const function = "cuStreamEndCapture";
  return enter(Needs::kContext, function, [&](State& all, auto&) {
    return with_stream(all, handle, function, [&](const StreamPtr& stream) {
      const std::shared_ptr<Capture> capture = stream->capture;
      *graph = nullptr;
      if (capture == nullptr) return refuse(cuda::kIllegalState, "%s: the stream is not captured", function);
      if (capture->origin != stream) {
        return break_capture(capture, kUnmatched, function, "the capture did not begin on this stream");
      }
      if (capture->mode != kModeRelaxed && capture->thread != std::this_thread::get_id()) {
        return break_capture(capture, kWrongThread, function, "another thread began the capture");
      }
      const bool joined = all_joined(*capture->graph, stream->frontier);
      for (const StreamPtr& one : std::vector<StreamPtr>(capture->joined)) {
        if (one->capture == capture) leave(*one);
      }
      capture->joined.clear();
      capture->origin = nullptr;
      all.captures.erase(capture);
      all.garbage.push_back(capture);
      if (capture->broken) return refuse(kInvalidated, "%s: an earlier call made the capture invalid", function);
      if (!joined) return refuse(kUnjoined, "%s: work that was forked off was not joined by an event", function);
      *graph = capture->graph.get();
      all.graphs[*graph] = capture->graph;
      return CUresult{cuda::kSuccess};
    });
  });
}

CUresult cuStreamGetCaptureInfo_v3(CUstream handle, int* status, std::uint64_t* id, SimGraph* graph,
                                   const SimNode** nodes, const void** edges, std::size_t* count) {
  return enter(Needs::kContext, "cuStreamGetCaptureInfo", [&](State& all, auto&) {
    return with_stream(all, handle, "cuStreamGetCaptureInfo", [&](const StreamPtr& stream) {
      const CUresult refused = check_legacy(all, *stream, "cuStreamGetCaptureInfo", true);
      if (refused != cuda::kSuccess) return refused;
      const Capture* const capture = stream->capture.get();
      *status = capture == nullptr ? 0 : capture->broken ? 2 : 1;
      if (capture == nullptr) return CUresult{cuda::kSuccess};
      if (id != nullptr) *id = capture->id;
      if (graph != nullptr) *graph = capture->graph.get();
      if (nodes != nullptr) *nodes = reinterpret_cast<const SimNode*>(stream->frontier.data());
      if (edges != nullptr) *edges = nullptr;
      if (count != nullptr) *count = stream->frontier.size();
      return CUresult{cuda::kSuccess};
    });
  });
}

CUresult cuStreamIsCapturing(CUstream handle, int* status) {
  return cuStreamGetCaptureInfo_v3(handle, status, nullptr, nullptr, nullptr, nullptr, nullptr);
}

namespace {

// Calls body(the shared pointer behind a handle).
template <class Map, class Body>
CUresult with(Map& map, void* handle, const char* function, Body body) {
  const auto found = map.find(handle);
  if (found != map.end()) return body(found->second);
  return refuse(cuda::kInvalidValue, "%s: %p is no such object, or was destroyed", function, handle);
}

template <class Map>
CUresult destroy(State& all, Map& map, void* handle, const char* function) {
  return with(map, handle, function, [&](auto& held) {
    all.garbage.push_back(std::move(held));
    map.erase(handle);
    return CUresult{cuda::kSuccess};
  });
}

}  // namespace

CUresult cuGraphInstantiateWithFlags(SimExec* made, SimGraph graph, unsigned long long) {
  return enter(Needs::kContext, "cuGraphInstantiate", [&](State& all, auto&) {
    return with(all.graphs, graph, "cuGraphInstantiate", [&](const std::shared_ptr<Graph>& held) {
      auto executable = std::make_shared<Executable>();
      executable->graph = held;
      *made = executable.get();
      all.executables[*made] = std::move(executable);
      return CUresult{cuda::kSuccess};
    });
  });
}

CUresult cuGraphLaunch(SimExec executable, CUstream handle) {
  return enter(Needs::kContext, "cuGraphLaunch", [&](State& all, auto& lock) {
    return with(all.executables, executable, "cuGraphLaunch", [&](const std::shared_ptr<Executable>& held) {
      return with_stream(all, handle, "cuGraphLaunch", [&](const StreamPtr& stream) {
        if (stream->capture) return break_capture(stream->capture, kUnsupported, "cuGraphLaunch", "a graph in a graph");
        const CUresult refused = check_legacy(all, *stream, "cuGraphLaunch");
        if (refused != cuda::kSuccess) return refused;
        ++all.counts.launches;
        const std::shared_ptr<Executable> keep = held;
        launch(all, lock, *keep, stream);
        all.garbage.push_back(keep);
        return CUresult{cuda::kSuccess};
      });
    });
  });
}

CUresult cuGraphExecDestroy(SimExec executable) {
  return enter(Needs::kContext, "cuGraphExecDestroy",
               [&](State& all, auto&) { return destroy(all, all.executables, executable, "cuGraphExecDestroy"); });
}

CUresult cuGraphDestroy(SimGraph graph) {
  return enter(Needs::kContext, "cuGraphDestroy",
               [&](State& all, auto&) { return destroy(all, all.graphs, graph, "cuGraphDestroy"); });
}

// CUDA's way to hand out a list: with `nodes` null its length, else at most `count` of it.
CUresult cuGraphGetNodes(SimGraph graph, SimNode* nodes, std::size_t* count) {
  return enter(Needs::kContext, "cuGraphGetNodes", [&](State& all, auto&) {
    return with(all.graphs, graph, "cuGraphGetNodes", [&](const std::shared_ptr<Graph>& held) {
      if (nodes != nullptr) *count = std::min(*count, held->nodes.size());
      for (std::size_t i = 0; nodes != nullptr && i < *count; ++i) nodes[i] = &held->nodes[i];
      if (nodes == nullptr) *count = held->nodes.size();
      return CUresult{cuda::kSuccess};
    });
  });
}
