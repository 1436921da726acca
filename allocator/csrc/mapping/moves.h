// Moves the bytes behind an address to another page, of any place, to which the address then leads. `Aliasing` leads
// addresses to the pages of another range.
//
// Guarantees: at any moment the address leads to a page with its bytes. A move that fails, or whose piece is retired
// meanwhile, changes nothing; entries that were admitted stay valid (takes.h).
//
// Lock: a group's, then one of its own, as one page at a time is filled, then the mapper's.
#pragma once

#include <mutex>

#include "mapping/copies.h"
#include "mapping/mapping.h"

namespace ballonet {

// Leads pieces to the pages of another range, and to pages of their own again, under the tensors that lie there.
//
// Note [Aliases]
// A streamed layer has no pages of its own. Its addresses lead to a slot that it shares with others and that holds its
// weights while it runs, or else to its backing (host-mapped). They are changed only when everything that was submitted
// has passed, and only while no other thread holds a lease on the layer. The addresses then show the bytes of the other
// range or, with pages of their own again, undefined ones: the caller copies in the right ones.
//
// Guarantees: all pieces change or none. Each returns false, with nothing changed, while another thread holds a lease
// on the range or a stream is being captured, and throws DriverError or UsageError with nothing changed.
//
// Lock: these take the group's lock, then the mapper's.

class Aliasing {
 public:
  Aliasing(AddressSpace& space, Fences& fences, Retirement& retirement, Mapping& mapping)
      : space_(space), fences_(fences), retirement_(retirement), mapping_(mapping) {}

  // Leads pieces to the pages of `source`, whatever they led to before; pages of their own become free. Tensors may lie
  // there. Where all pieces led nowhere, neither leases nor captures are in the way.
  bool alias(Range& range, std::size_t first, Range& source, std::size_t source_first, std::size_t count);
  // Gives aliased pieces device pages of their own, whose contents are undefined. Throws PoolExhausted too.
  bool own(Range& range, std::size_t first, std::size_t count);
  // Aliased pieces get the device pages of `spare` as their own, which hold the same bytes; `spare` has them no more.
  // False also where tensors show those pages.
  bool adopt(Range& range, std::size_t first, Range& spare, std::size_t spare_first, std::size_t count);
  // Pages of `spare` come to pieces of `twin`, whose own become free, and the same pieces of `range` lead there where
  // they led to those: all hold the same bytes, so that nothing that was admitted is void (takes.h). `spare` has them
  // no more. False also where others lead to these pages.
  bool take_over(Range& twin, std::size_t first, Range& spare, std::size_t spare_first, std::size_t count,
                 Range& range);

 private:
  // What pieces would lead to; was nothing there before, and is one of them about to lose a page?
  struct Led {
    std::vector<Target> targets;
    bool bare = true, retiring = false;
  };
  Led lead(const Range& range, std::size_t first, const Range& source, std::size_t source_first, std::size_t count);
  bool shown_once(const Piece& piece) { return space_.pool(piece.place).book.mappings(piece.page) == 1; }

  AddressSpace& space_;
  Fences& fences_;
  Retirement& retirement_;
  Mapping& mapping_;
};

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
