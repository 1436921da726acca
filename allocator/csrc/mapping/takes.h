// Evicts the pages of an entry to its backing range while addresses stay valid; which may be taken is `Takeable`.
//
// Note [Taking]
// The addresses of a taken entry lead to its backing range from then on: slower, and valid throughout. The bytes are
// there already ("clean"), or are copied from its sources or its own pages; then all addresses are led there at once,
// and the pages are free. It happens while nothing that was submitted still runs and no other thread holds a lease, on
// the thread that needs pages, which holds the group's lock throughout: see Note [Waiting] in address_space.h. A
// failure in the middle leaves all as it was: new pages of the backing range retire.
//
// Guarantees: what is passed to `take` is taken whole or not at all; of a divisible entry Reclaim passes a part. A void
// entry is never taken (takes.h).
//
// Lock: these take the group's, then the mapper's, and let go of that one while they wait.
#pragma once

#include <algorithm>
#include <map>
#include <memory>
#include <vector>

#include "mapping/copies.h"
#include "mapping/mapping.h"

namespace ballonet {

// Pages of ranges in use that may be taken, and the outcome of taking them.
//
// Note [Void]
// An entry describes pieces as they are when it is published: those of the range have pages of their own and hold the
// right bytes, those of its backing range are backed and hold the same, or are not backed. Any later change may make
// this wrong: a backing range that was just mapped holds nothing yet. So each piece records its last change, and an
// entry admitted before that is void. A piece that was only moved to another page holds the same bytes, which is no
// change.
//
// Note [Buffers]
// A buffer that layers take turns in holds the bytes of one of them, and the addresses of all of them lead to it. Each
// has its bytes in its backing range throughout, so the buffer may go as well: all addresses that lead to its pages are
// led to their own backing ranges, at once, and nothing is copied. Its own addresses lead nowhere afterwards, as only
// copies use them: their submitter holds a lease, and looks first. An entry that does not name every address that leads
// to a page of its buffer is passed over.
//
// Guarantees: a void entry is never found fit to be taken; looking changes nothing.

// Weights, or other bytes, whose pages may be taken: they go to a backing range, of host or peer pages, and their
// addresses lead there afterwards.
struct Takeable {
  struct Source {
    std::size_t offset;   // bytes from the beginning of the part
    CUdeviceptr address;  // registered memory, or bytes of the part itself
    std::size_t size;
  };
  struct Part {
    std::weak_ptr<Range> range;
    std::size_t first, count;
    std::weak_ptr<Range> twin;  // the backing range
    std::size_t twin_first;
    std::vector<Source> sources;  // of what `twin` lacks; none: the part itself
    bool buffer = false;          // has no `twin`: addresses of the other parts lead to its pages
  };
  std::shared_ptr<Group> group;  // of every range
  std::vector<Part> parts;
  std::uint64_t as_of = 0;  // the table's changes when it was admitted
};

// The outcome of taking.
struct Taken {
  enum class Fate {
    kTaken,   // `pages` of the device are free
    kLeased,  // another thread holds a lease on the group
    kLater,   // the host has no pages for `twin`, a graph is being captured, or others lead to these pages
    kVoid     // never: a range is gone, or leads elsewhere than when this was admitted
  } fate;
  std::size_t pages;
  std::size_t lacking = 0;  // pages for backing ranges that it takes
  bool kv = false;          // which may be the peer's
};

// Pages for backing ranges that can be had.
struct Room {
  std::size_t host, peer;
  // Subtracts the pages that an entry lacks, the peer's first where they may lie there. False, and nothing subtracted,
  // where there are too few.
  bool holds(const Taken& found) {
    const std::size_t near = found.kv ? std::min(found.lacking, peer) : 0;
    if (found.lacking - near > host) return false;
    peer -= near;
    host -= found.lacking - near;
    return true;
  }
};

// Pre: the mapper's lock is held.
Room room_for_twins(const AddressSpace& space);

// A read-only look at the ranges of an entry. It holds the ranges, so it is made before the mapper's lock is taken and
// destroyed after it.
//
// Lock: the mapper's, held by the caller of everything but the constructor.
class Examination {
 public:
  struct Ends {  // of a part
    std::shared_ptr<Range> range, twin;
    bool buffer;
    bool open() const { return range && !range->closed && (buffer || (twin && !twin->closed)); }
  };

  Examination(AddressSpace& space, const Copies& copies, const Takeable& takeable);

  // False where a range is gone. Throws UsageError where the entry is invalid.
  bool admissible() const;
  // The outcome of taking it, leases aside.
  Taken outcome() const;
  bool unchanged(std::uint64_t as_of) const;
  // Are pages not what they were when it was admitted, although no change was recorded?
  bool broken() const;
  // Up to so many pieces of a divisible, admitted entry that can be taken now, the first of all parts first,
  // as far as there is `room` for their backing ranges. No parts where there are none.
  Takeable first_of(std::size_t most, Room room) const;
  const std::vector<Ends>& ends() const { return ends_; }

 private:
  // The pages of an entry's buffers, and how often each is mapped as far as the entry knows.
  using Shared = std::map<PageId, unsigned>;
  Shared shared() const;
  bool unchanged(std::size_t part, std::uint64_t as_of) const;
  bool part_still_valid(std::size_t part, const Shared& shared) const;
  bool sources_there(std::size_t part) const;
  bool can_take_piece(std::size_t part, std::size_t piece) const;
  std::size_t twin_of(std::size_t part, std::size_t piece) const {
    return takeable_.parts[part].twin_first + piece - takeable_.parts[part].first;
  }

  AddressSpace& space_;
  const Copies& copies_;
  const Takeable& takeable_;
  std::vector<Ends> ends_;
};

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
