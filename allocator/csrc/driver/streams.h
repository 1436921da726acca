// Every stream that may touch a page, and fences over them: the only sign that a page is no longer used.
//
// Note [Fences]
// Unmapping orders nothing against running work, so a page leaves an address only after a fence: one event on every
// stream ever seen, recorded after the last use was submitted. A fence is recorded at the first look at it, which may
// be later than it was made: it then waits for more than it must, never for less. So retirements that wait for their
// first look share one.
//
// Note [Fences and captures]
// An event that is recorded on a stream that is being captured belongs to the graph: it never comes, and looking at it
// breaks the capture. So no event is recorded while a stream seen is being captured, and where it was is asked again
// after the record: a capture may begin in between on another thread, and then the events are dropped without a look. A
// caller that announces captures (`captures_may_begin`) has no fence recorded at all before it says that they are over,
// unless a caller has to wait for one.
//
// Note [Streams without events]
// Where no event can be had of a stream, the whole context is synchronised once: `Fence::sync` says after which of
// these synchronisations the fence has passed. A stream that was destroyed is forgotten then, as what it was given is
// done. So is it for memory of a graph: no call tells on which streams that was replayed.
//
// Note [Streams of threads]
// The per-thread default stream has one handle for all threads (2) and is the asking thread's. It is a blocking stream,
// so that an event on the legacy stream comes after the work of all of them: to note it is to note the legacy stream,
// which is in every fence.
//
// Guarantees: a fence has passed once every stream it is over has done what it was given before.
//
// Lock: the mapper's, held by the caller, with the device's context current; `known` and `wait` need none.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <vector>

#include "base/tuning.h"
#include "driver/driver.h"

namespace ballonet {

struct Fence {
  std::vector<CUevent> events;
  bool recorded = false;
  std::uint64_t sync = 0;  // this synchronisation of the context has to have ended; 0: none
};

// What a fence that has not passed waits for. Events may be recorded again meanwhile, and then stand for later work.
struct Awaited {
  std::vector<CUevent> events;
  std::uint64_t sync = 0;
};

// The handle of the calling thread's own default stream.
inline bool is_per_thread(CUstream stream) { return stream == cuda::kPerThreadStream; }

class Streams {
 public:
  explicit Streams(const Driver& driver) : driver_(driver) {}

  // The legacy stream for a handle that stands for it, or for the default streams of all threads.
  static CUstream of_all_threads(CUstream stream) {
    return stream == cuda::kLegacyStream || is_per_thread(stream) ? nullptr : stream;
  }
  // Has the stream been noted? On any thread, without a lock; may be false for a stream that was.
  bool known(CUstream stream) const;
  void note(CUstream stream);
  // Captures began or ended on any stream; they nest.
  void captures_may_begin() { ++captures_; }
  void captures_are_over(std::size_t count) { captures_ -= count; }

  // Over every stream seen, recorded when it is first looked at.
  static Fence fence() { return {}; }
  // A fence over all streams, those never seen too: the whole context is synchronised.
  Fence fence_over_all();
  const std::vector<CUstream>& seen() const { return seen_; }
  // A fence over these, recorded now unless one of them is being captured.
  Fence fence(const std::vector<CUstream>& some);
  bool passed(Fence& fence);  // never blocks
  // Records the fence if it must. Throws UsageError while a stream is being captured.
  Awaited awaited(Fence& fence);
  // Blocks until these were reached. Any thread may call it without the lock. Throws DriverError.
  void wait(const std::vector<CUevent>& events) const;
  // The number of a synchronisation of the context that begins now; to be ended once it is done.
  std::uint64_t begin_sync() { return ++syncs_begun_; }
  void end_sync(std::uint64_t number);
  // Does a fence wait for a synchronisation that has not ended?
  bool sync_wanted() const { return syncs_wanted_ > syncs_done_; }
  std::uint64_t syncs_done() const { return syncs_done_; }
  bool capturing() const { return capturing(seen_); }
  bool capturing(const std::vector<CUstream>& some) const;
  // Takes back the events of a fence that is not used any more.
  void recycle(Fence& fence);
  // Destroys spare events. Call once, before the context goes.
  void close();

 private:
  void forget(CUstream stream);  // it was destroyed
  void record(Fence& fence, std::vector<CUstream> streams);
  CUevent event();
  void want_sync(Fence& fence);

  const Driver& driver_;
  std::vector<CUstream> seen_{nullptr};
  std::array<std::atomic<CUstream>, tuning::kQuickStreams> quick_{};
  std::vector<CUevent> spare_;
  std::size_t captures_ = 0;
  std::uint64_t syncs_begun_ = 0, syncs_wanted_ = 0, syncs_done_ = 0;
  std::uint64_t lost_ = 0;  // the synchronisation after which streams that were dropped have done their work
};

}  // namespace ballonet
