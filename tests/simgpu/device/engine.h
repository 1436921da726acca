// Streams: queues of operations, each run by a thread of its own, so that the host runs ahead as it does on a GPU.
//
// Words
//   work       what can be run: once, or by each replay of a graph that holds it
//   operation  one run of a work at its place in a stream; without a work it is a mark, which does nothing
//
// Note [Order]. A stream's operations run one after the other. An operation may also name operations of other streams
// that come before it: those that its stream waits for by an event, and what the legacy default stream implies. The
// legacy stream comes after all that the blocking streams of its device had queued, and they come after it.
//
// Note [Death]. An operation that would touch memory which changed since it was queued is reported and not run. From
// then on the device is dead, as a GPU's context is after an illegal access: what is queued is passed over, every call
// answers 700, and the process ends with a status of its own (see state.cpp).
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "watch.h"

namespace simgpu {

using Lock = std::unique_lock<std::mutex>;

// When what this thread runs was queued, by `Watch::serial`; nothing on a thread that is no worker.
std::optional<std::uint64_t> queued_as();
void fail(const char* why);  // by what a worker's thread runs: it has failed, as a kernel's assertion does

struct Work {
  std::string name;
  std::vector<Range> ranges;
  std::function<bool()> run;  // called without the lock; false = what it reads is gone
  void (*drop)(void*) = nullptr;
  void* context = nullptr;
  bool kernel = false;

  Work() = default;
  Work(const Work&) = delete;
  ~Work() {
    if (drop != nullptr) drop(context);
  }
};

struct Operation {
  std::shared_ptr<Work> work;
  std::vector<std::shared_ptr<Operation>> after;  // of other streams
  std::uint64_t serial = 0;                       // of the watch, when it was queued
  Trace queued;
  bool done = false;
  std::int64_t ended_ns = 0;
};
using OperationPtr = std::shared_ptr<Operation>;

struct Capture;
struct Node;

struct Stream {
  CUstream handle = nullptr;
  int device = 0, priority = 0;
  bool blocking = true, legacy = false;
  std::deque<OperationPtr> queue;  // the first may be running
  bool running = false;
  OperationPtr last;                 // the newest that was queued
  std::vector<OperationPtr> awaits;  // what the next one comes after
  std::uint64_t random = 0;
  bool closed = false, has_worker = false;
  std::condition_variable wake;

  std::shared_ptr<Capture> capture;   // while it is captured
  std::vector<const Node*> frontier;  // what the next node comes after
};
using StreamPtr = std::shared_ptr<Stream>;

struct State;

class Engine {
 public:
  explicit Engine(State& all) : all_(all) {}

  StreamPtr create(int device, bool blocking, int priority);
  void destroy(const StreamPtr& stream);        // what was queued still runs
  StreamPtr find(CUstream handle, int device);  // null where there is none
  const std::map<CUstream, StreamPtr>& streams() const { return streams_; }

  OperationPtr submit(Lock& lock, const StreamPtr& stream, std::shared_ptr<Work> work);
  OperationPtr mark(Lock& lock, const StreamPtr& stream) { return submit(lock, stream, nullptr); }
  void wait(Lock& lock, const OperationPtr& operation);
  void wait_for_all(Lock& lock, int device);  // -1: every device
  bool idle(const Stream& stream) const;
  bool busy() const { return pending_ > 0; }
  void hold(bool on);
  // Before [address, address + size) changes: an operation that is running there is reported, and waited for.
  void before_change(Lock& lock, std::uint64_t address, std::uint64_t size, const char* what);
  void die(CUresult result);  // error 700 from now on
  void stop(Lock& lock);      // ends the threads; what has not run does not
  std::uint64_t random(Stream& stream);

 private:
  void imply_order(const Stream& stream, Operation& operation);
  void serve(const StreamPtr& stream);
  void run(Lock& lock, Stream& stream, Operation& operation);
  void report(const Stream& stream, const Operation& operation, const std::string& what,
              CUresult result = ballonet::cuda::kIllegalAddress);
  void forget(Operation& operation, std::vector<std::shared_ptr<void>>& garbage);

  State& all_;
  std::map<CUstream, StreamPtr> streams_;
  std::map<int, StreamPtr> legacy_;
  std::map<std::pair<std::thread::id, int>, StreamPtr> per_thread_;
  std::vector<std::weak_ptr<Stream>> all_streams_;  // those above, and closed ones that still run
  std::condition_variable progress_;
  std::uint64_t pending_ = 0, workers_ = 0, next_handle_ = 1;
  bool held_ = false, stopping_ = false;
};

}  // namespace simgpu
