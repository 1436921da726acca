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
#pragma once

#include <vector>

#include "mapping/address_space.h"

namespace ballonet {

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

}  // namespace ballonet
