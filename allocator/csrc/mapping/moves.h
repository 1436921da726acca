// Moves the bytes behind an address to another page, of any place, to which the address then leads.
//
// Guarantees: at any moment the address leads to a page with its bytes. A move that fails, or whose piece is retired
// meanwhile, changes nothing; entries that were admitted stay valid (takes.h).
//
// Lock: a group's, then one of its own, as one page at a time is filled, then the mapper's.
#pragma once

#include <mutex>

#include "mapping/copies.h"
#include "mapping/exchange.h"
#include "mapping/mapping.h"

namespace ballonet {

class Moves {
 public:
  Moves(AddressSpace& space, Fences& fences, Retirement& retirement, Mapping& mapping, Copies& copies);

  // Copies one piece to another page in `to` and maps that in its place. False where nothing was changed: no page is
  // free, the piece is not movable, or another thread holds a lease. Throws DriverError with nothing changed.
  bool move(Range& range, std::size_t piece, Place to);
  // Waits for the copy stream and frees the scratch addresses; false where the driver refuses one of the two now. Pre:
  // the mapper's lock is held.
  bool clear_scratch();
  const Stretch& scratch() const { return scratch_; }

 private:
  void fill(Section& in, CUdeviceptr from, const Target& fresh);

  AddressSpace& space_;
  Fences& fences_;
  Retirement& retirement_;
  Mapping& mapping_;
  Copies& copies_;
  Stretch scratch_;  // addresses of one page, where it is filled; not empty between moves where an unmap has failed
  std::mutex mutex_;
  const HeldOverFork held_{ForkRank::kScratch, mutex_};
};

}  // namespace ballonet
