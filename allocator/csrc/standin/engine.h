// Streams and the copy engine: one thread that carries out copies and fills in stream order.
//
// Note [What a copy does]. When it is submitted its destination is filled with 0xFF (a NaN in every floating type), so
// that a reader that does not wait computes NaN. The bytes follow in pieces, read from the source when each is due, as
// DMA would: between host and devices at the settable bandwidth after the settable latency, one copy at a time in each
// direction, both directions at once; between the two devices in the same way, at a bandwidth of its own and without
// latency; otherwise as fast as memory. When each byte is due follows from when its copy could begin: a thread that
// wakes up late makes up for it. The poison waits until the copy begins where work that is still to come touches the
// destination: that work is ordered before the copy, so it must not see it.
//
// With a latency of kEndless no copy between host and devices begins before there is another.
//
// Registered memory is read in a way that cannot fault, see registered.h. Where it is gone when its bytes are due, the
// copy has failed: its destination is poison as a whole, and the first marker behind it in its stream says so, each
// time that it is asked. A stream that waits for such a marker has failed in the same way. What comes after is carried
// out.
//
// Stream 0 is the calling thread: a submission to it waits, and poison is never seen.
//
// Lock: the stand-in's (state.h), held by the caller; functions with a Lock let go of it while they wait.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "mappings.h"
#include "order.h"

namespace ballonet::standin {

struct Failure {  // of a copy
  std::uint64_t source, size;
};

struct Marker {  // a point in a stream
  bool reached = false;
  Clock clock;
  std::optional<Failure> failure;  // of what lies before it and behind the marker before
};

constexpr std::uint64_t kEndless = ~std::uint64_t{0};

enum class Link { kNone, kToDevice, kToHost, kFromPeer, kToPeer };

struct Op {
  enum Kind { kCopy, kFill, kWait, kMark } kind;
  char* destination = nullptr;
  const char* source = nullptr;
  std::uint64_t size = 0;
  unsigned char value = 0;  // of a fill
  Link link = Link::kNone;
  bool registered = false;  // the source is
  std::vector<Run> reads, writes;
  std::shared_ptr<Marker> marker;  // of kWait and kMark

  enum { kHeld, kPoisonFirst, kReady, kRunning, kFailed } state = kReady;
  std::uint64_t done = 0;                           // bytes delivered
  std::chrono::steady_clock::time_point submitted;  // when it was queued
  std::chrono::steady_clock::time_point begun;      // when the first byte crosses
  double ns_per_byte = 0;
};

struct Stream {
  std::uint32_t index = 0;
  std::deque<std::unique_ptr<Op>> queue;
  std::optional<Failure> failure;                    // not told yet
  std::chrono::steady_clock::time_point ready_at{};  // when what lies before the queue was due to be done
};

class Engine {
 public:
  using Lock = std::unique_lock<std::mutex>;

  explicit Engine(std::mutex& mutex) : mutex_(mutex) {}
  void configure(std::uint64_t bandwidth, std::uint64_t latency_ns, std::uint64_t peer_bandwidth);
  // Queues a copy or a fill. On stream 0 returns when it is done, with its failure. The lock is released meanwhile.
  std::optional<Failure> submit(Lock& lock, const std::shared_ptr<Stream>& stream, std::unique_ptr<Op> op);
  // A marker at the stream's present end.
  std::shared_ptr<Marker> mark(const std::shared_ptr<Stream>& stream, Clock clock);
  void wait_for(const std::shared_ptr<Stream>& stream, const std::shared_ptr<Marker>& marker);  // the stream waits
  void wait(Lock& lock, const std::shared_ptr<Marker>& marker);                                 // the caller waits
  std::optional<Failure> drain(Lock& lock);  // the caller waits for all
  bool touched_by_pending(const std::vector<Run>& runs) const;
  void stop();  // ends the thread; the next submission starts another

 private:
  using Time = std::chrono::steady_clock::time_point;

  void enqueue(const std::shared_ptr<Stream>& stream, std::unique_ptr<Op> op);
  void run();
  bool advance(Lock& lock, Time* sleep_until);
  bool pass(Stream& stream);
  void begin(const Stream& stream, Op& op);
  void move(Lock& lock, Op& op);

  std::mutex& mutex_;
  std::condition_variable work_;               // for the thread: something was queued
  std::condition_variable reached_;            // for callers: a marker was reached
  std::vector<std::shared_ptr<Stream>> busy_;  // those with a queue
  std::thread thread_;
  bool stopping_ = false;
  std::uint64_t bandwidth_ = 0, latency_ns_ = 0, peer_bandwidth_ = 0;
  Time link_free_at_[4] = {};  // by link and direction
};

}  // namespace ballonet::standin
