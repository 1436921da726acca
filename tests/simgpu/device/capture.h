// Captures of streams into graphs.
//
// A graph's nodes are kept in the order in which they were captured, each with those it comes after. A launch queues
// them to one stream, in that order, or with a seed in any order that their dependencies admit: a missing dependency
// then shows as other results.
#pragma once

#include <deque>
#include <memory>
#include <thread>
#include <vector>

#include "engine.h"

namespace simgpu {

struct Node {
  std::shared_ptr<Work> work;                     // null: an event's record or wait
  std::vector<const Node*> after;                 // of the same graph
  CUevent recorded = nullptr, awaited = nullptr;  // external events
};

struct Graph {
  std::deque<Node> nodes;  // an address stays
};

struct Executable {
  std::shared_ptr<Graph> graph;
  OperationPtr last;  // of its newest launch, which the next one comes after
};

struct Capture {
  std::shared_ptr<Graph> graph = std::make_shared<Graph>();
  StreamPtr origin;
  std::thread::id thread;
  int mode = 0;
  std::uint64_t id = 0;
  bool broken = false;
  std::vector<StreamPtr> joined;  // the origin too
};

constexpr int kModeGlobal = 0, kModeRelaxed = 2;

struct State;
struct Event;

// Adds a node at the end of what the stream has captured.
CUresult add_node(const StreamPtr& stream, Node node, const char* function);
// Where the call is one that a capture under way forbids to this thread, breaks that capture and refuses.
CUresult check_safe(State& all, const char* function);
// Refuses what would make the legacy stream wait for a captured one; breaks that capture unless it is only asked.
CUresult check_legacy(State& all, const Stream& stream, const char* function, bool only_asks = false);
CUresult break_capture(const std::shared_ptr<Capture>& capture, CUresult code, const char* function, const char* why);
CUresult record_captured(State& all, Event& event, CUevent handle, const StreamPtr& stream, bool external);
CUresult wait_captured(State& all, Event& event, CUevent handle, const StreamPtr& stream, bool external);

}  // namespace simgpu
