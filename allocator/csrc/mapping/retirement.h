// Retiring pages: they stay at their addresses until every stream has passed.
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

#include "mapping/cached_ranges.h"
#include "mapping/fences.h"

namespace ballonet {

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
