// Evicts the pages of an entry to its backing range while addresses stay valid.
//
// Note [Taking]
// The addresses of a taken entry lead to its backing range from then on: slower, and valid throughout. The bytes are
// there already ("clean"), or are copied from its sources or its own pages; then all addresses are led there at once,
// and the pages are free. It happens while nothing that was submitted still runs and no other thread holds a lease, on
// the thread that needs pages, which holds the group's lock throughout: see Note [Waiting] in address_space.h. A
// failure in the middle leaves all as it was: new pages of the backing range retire.
//
// Guarantees: what is passed to `take` is taken whole or not at all; of a divisible entry Reclaim passes a part. A void
// entry is never taken (takeable.h).
//
// Lock: these take the group's, then the mapper's, and let go of that one while they wait.
#pragma once

#include <vector>

#include "mapping/exchange.h"
#include "mapping/mapping.h"
#include "mapping/takeable.h"

namespace ballonet {

class Takes {
 public:
  Takes(AddressSpace& space, Fences& fences, Retirement& retirement, Mapping& mapping, Copies& copies)
      : space_(space), fences_(fences), retirement_(retirement), mapping_(mapping), copies_(copies) {}

  // Stamps an entry, so that any later change of a piece it names makes it void. False where it is void already. Throws
  // UsageError where it is invalid.
  bool admit(Takeable& takeable);
  // The outcome that `take` would have.
  Taken outlook(const Takeable& takeable);
  // Takes all or nothing. `near`: may backing ranges get pages of the peer? Throws DriverError with nothing changed.
  Taken take(Takeable& takeable, bool near = true);
  // A part of a divisible entry; see Examination::first_of.
  Takeable first_of(const Takeable& takeable, std::size_t most, Room room);
  Room room();
  // Throws InvariantBroken where nothing has changed since it was admitted and its pages are not what they were.
  void check(const Takeable& takeable);

 private:
  // The pieces of a backing range that lack their bytes, and the copies that bring them.
  struct Filling {
    Range& range;
    Range& twin;
    Place place;  // of their pages
    std::vector<std::size_t> pieces;
    std::vector<Copy> copies;
  };
  using Fillings = std::vector<Filling>;
  bool plan(const Takeable& takeable, const Examination& examined, std::size_t on_peer, Fillings& fillings);
  Filling filling_of(const Takeable::Part& part, const Examination::Ends& ends, Place place, std::size_t& next,
                     std::size_t most) const;
  void back(const Fillings& fillings);
  void copy_in(Section& in, const Fillings& fillings);
  void lead_to_twins(const Takeable& takeable, const Examination& examined);
  void drop(const Fillings& fillings, std::uint64_t as_of);

  AddressSpace& space_;
  Fences& fences_;
  Retirement& retirement_;
  Mapping& mapping_;
  Copies& copies_;
};

}  // namespace ballonet
