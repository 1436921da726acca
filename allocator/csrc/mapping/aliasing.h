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
#pragma once

#include "mapping/exchange.h"
#include "mapping/mapping.h"

namespace ballonet {

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

}  // namespace ballonet
