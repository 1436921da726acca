// Pages of a range's own: where they come from, and how they get behind its pieces, also in exchange for others.
//
// Guarantees: all requested pieces are backed, or none has changed.
//
// Lock: the mapper's. Functions with a Section run within it; `map` and `prepare_host` let go of it while they wait.
#pragma once

#include <vector>

#include "mapping/address_space.h"
#include "mapping/retirement.h"

namespace ballonet {

// Exchanges pages under addresses that tensors lie over: all of them, or none.
//
// Note [Readers without a lease]
// A thread that computes with a weight outside of any forward holds no lease. On the stand-in it reads what it should
// at any moment: both pages hold the same bytes, and the one takes the place of the other in one step (`Driver::hold`).
// A driver has no such call: from the unmap to the access of the next page the address has no page, and work that
// another thread submits just then fails. So such a thread takes a lease (`Managed.resident`).
//
// Guarantees: all changes are made or, with an exception, what was there is put back; a page that nobody owns any more
// is free.
//
// Lock: the mapper's, held by the caller since everything that was submitted has passed (Fences::quiesce).

// New targets of the pieces of a range from `first` on.
struct Change {
  Range& range;
  std::size_t first;
  std::vector<Target> targets;
  bool same_bytes = false;  // so that entries that name these pieces stay valid
};

// Puts other pages behind pieces. Pages of a range's own that are behind no piece of it afterwards, be they old or new,
// are free. Throws DriverError with everything as it was; a driver that refuses that again and again leaves pieces that
// are not open, which the next `map` opens, or unbacked. Pre: no piece is retiring or kept.
void exchange_pages(AddressSpace& space, const std::vector<Change>& changes);

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
