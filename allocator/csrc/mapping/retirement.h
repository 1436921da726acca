// Retiring pages: they stay at their addresses until every stream has passed, which `Fences` wait for.
//
// Note [Retiring]
// `retire` never waits. It labels the pages, makes a fence and queues both. Pages whose fence has passed are unmapped
// in the background, and earlier by threads that need pages (`reap`). A piece that is mapped again before that simply
// takes its page back, with no driver call. An unmap that fails leaves the piece in the queue for the next reap: a page
// is never forgotten.
//
// Guarantees: a piece retires exactly as long as the queue has an entry with its ticket, which keeps its range alive.
//
// Lock: the mapper's, held by the caller; functions with a Section may let go of it where they wait.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "driver/streams.h"
#include "mapping/address_space.h"
#include "mapping/background.h"
#include "mapping/cached_ranges.h"

namespace ballonet {

// Fences for any thread: waiting for the work of streams.
//
// Guarantees: no thread waits with the mapper's lock; a fence whose wait was interrupted can be waited for again.
//
// Lock: functions with a Section run within it, and let go of its lock while they wait (Note [Waiting] in
// address_space.h); `streams` is used within one. All others take the mapper's lock themselves.

class Fences {
 public:
  Fences(AddressSpace& space, Background& background);
  ~Fences();
  Fences(const Fences&) = delete;
  Fences& operator=(const Fences&) = delete;

  Streams streams;
  void await(Section& in, const Awaited& awaited);
  // Waits for everything that was submitted. False, and nothing waited for, while a stream is being captured.
  bool quiesce(Section& in);
  // Synchronises the context for the fences that want it. See streams.h, Note [Streams without
  // events]. False: later.
  bool synchronize_streams(Section& in);

  // Notes a stream, without a lock where it was noted before.
  void note_stream(CUstream stream);
  // Notes the stream if the address lies in a range.
  void note_stream_at(CUdeviceptr address, CUstream stream);
  // A stream of the device's context; it lasts as long as that.
  CUstream create_stream();
  // Tells the order checker, where there is one, what work on a stream uses.
  void note_use(CUdeviceptr address, std::size_t size, CUstream stream, bool write);
  // Tells it of all backed pieces of a range; without an order checker, notes the stream.
  void note_use(Range& range, CUstream stream, bool write);
  void synchronize();

  // Over some streams, for blocks used across streams; see live_blocks.h.
  Fence over(const std::vector<CUstream>& some);
  bool passed(Fence& fence);
  void wait(Fence& fence);
  // The two halves of it, for a fence that may be gone by the time that it has passed.
  Awaited awaited(Fence& fence) {
    Section in(space_);
    return streams.awaited(fence);
  }
  void wait(const Awaited& awaited) {
    Section in(space_);
    await(in, awaited);
  }
  void recycle(Fence& fence) {
    const std::lock_guard lock(space_.mutex);
    streams.recycle(fence);
  }
  // What `stream` is given from now on waits for the fence.
  void before(CUstream stream, const Fence& fence);
  bool capturing() {
    Section in(space_);
    return streams.capturing();
  }
  // Announce captures: see Note [Fences and captures] in streams.h.
  void captures_may_begin() {
    const std::lock_guard lock(space_.mutex);
    streams.captures_may_begin();
  }
  void captures_are_over(std::size_t count) {
    const std::lock_guard lock(space_.mutex);
    streams.captures_are_over(count);
  }

 private:
  AddressSpace& space_;
  Background& background_;
};

class Retirement {
 public:
  Retirement(AddressSpace& space, Fences& fences, CachedRanges& cached, Background& background)
      : space_(space), fences_(fences), cached_(cached), background_(background) {}

  // Unbacked pieces are skipped, pinned ones follow when their last pin goes, those mapped ahead are unclaimed like a
  // cached range's from here on. `unseen`: streams may use them that were never seen. Throws no DriverError.
  void retire(Range& range, const Spans& spans, bool unseen = false);
  // Completes retirements, the oldest first, whose fences have passed. Returns the pages freed.
  std::size_t reap(Section& in);
  // Waits until all have passed, and completes them.
  std::size_t reap_waiting(Section& in);
  // Completes retirements in the background, or now where there is none.
  void reap_later(Section& in);
  // Makes cached ranges of ranges that are closed and whose retirements have passed, and of nothing else: that takes no
  // driver call that is worth mentioning.
  void shelve_passed(Section& in);
  // Completes a few pieces of the oldest, for the background.
  Background::Next step(Section& in);

  std::size_t size() const { return queue_.size(); }  // retirements that are not done
  void check() const;                                 // throws InvariantBroken

 private:
  struct Entry {
    std::shared_ptr<Fence> fence;  // that of the next one too where it was not looked at before
    std::shared_ptr<Range> range;
    Spans spans;
    std::uint32_t ticket;
  };
  enum class Left { kNone, kSome, kRefused };
  Left finish(Entry& entry, std::size_t most, std::size_t& freed);
  template <class Visit>
  static void visit(const Entry& entry, Visit visit);

  AddressSpace& space_;
  Fences& fences_;
  CachedRanges& cached_;
  Background& background_;
  std::deque<Entry> queue_;
  std::uint32_t next_ticket_ = 1;
};

}  // namespace ballonet
