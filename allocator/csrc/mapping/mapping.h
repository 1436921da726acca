// Pages of a range's own: where they come from, and how they get behind its pieces.
//
// Guarantees: all requested pieces are backed, or none has changed.
//
// Lock: the mapper's. Functions with a Section run within it; `map` and `prepare_host` let go of it while they wait.
#pragma once

#include <vector>

#include "mapping/retirement.h"

namespace ballonet {

class Mapping {
 public:
  Mapping(AddressSpace& space, Fences& fences, CachedRanges& cached, Retirement& retirement)
      : space_(space), fences_(fences), cached_(cached), retirement_(retirement) {}

  // Backs pieces that are unbacked, kept or retiring; those already backed so are skipped. All or none.
  // `wait`: for pages that are retiring, where there are too few others. Throws PoolExhausted, also where the device
  // has no pages of the host at all, DriverError, UsageError.
  void map(Section& in, Range& range, std::size_t first, std::size_t count, Place place, bool wait);
  // Has so many pages of the host idle, or as many as can be had: `map` needs not wait for their memory to be pinned.
  // Takes the lock itself.
  void prepare_host(std::size_t pages);

  // Takes pages for pieces of a range: idle ones first, then those of retirements and cached ranges, then new ones,
  // then those that ranges keep, and last those mapped ahead. `hint`: see Pool::take. Throws PoolExhausted,
  // DriverError.
  std::vector<PageId> take(Section& in, Place place, std::size_t n, Owner owner, PageId hint = kNoPage);
  // Puts pages of their own behind unbacked pieces, in order, and opens them. All or none: on a failure mapped pieces
  // retire, and the pages are given back. Throws DriverError.
  void back(Range& range, const std::vector<std::size_t>& pieces, Place place, const std::vector<PageId>& pages);
  // The page that should be behind a piece, so that neighbours in address are neighbours in the pool.
  PageId hint_for(const Range& range, std::size_t piece, Place place) const;

 private:
  // The steps to back pieces.
  struct Pieces {
    std::vector<std::size_t> unbacked, claimed;
    std::vector<std::size_t> revived;  // take back the page that they were about to lose
    bool elsewhere = false;            // one is about to lose a page of another place
  };
  Pieces look(Range& range, std::size_t first, std::size_t count, LeadsTo wanted);
  void apply(Section& in, Range& range, const Pieces& found, const Span& span, Place place);

  AddressSpace& space_;
  Fences& fences_;
  CachedRanges& cached_;
  Retirement& retirement_;
};

}  // namespace ballonet
