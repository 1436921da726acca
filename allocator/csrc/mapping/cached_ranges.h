// Free pages that stay where they are mapped, until a mapping claims them there or they are taken away.
//
// Note [Cached ranges]
// When a range of KV is closed and its pages have retired they are free, but nothing is unmapped: the next range that
// is reserved gets the addresses, and finds its first pages mapped. So a program that serves one request after the
// other comes to call the driver no more. Such a cached range (eLLM: slot) costs nothing: its pages count as free, and
// are taken out, those of the oldest first and the last piece first, before a new page is created. Pages mapped ahead
// of time are kept in the same way, by a range that is in use; they will be claimed within a step of the model, so they
// go last of all; so do those mapped in cached ranges for ranges that are about to come (ahead.h).
//
// A range that `keeps` does so while it is open: pages that some of its users give back the next ones claim. As these
// come again and again, its pages are taken once no new page can be created, but before pages in use are.
//
// Guarantees: in a cached range every page is kept, and there is one; a page that is kept anywhere is free in its pool.
//
// Lock: the mapper's, held by the caller.
#pragma once

#include <deque>
#include <vector>

#include "mapping/address_space.h"

namespace ballonet {

class CachedRanges {
 public:
  explicit CachedRanges(AddressSpace& space) : space_(space) {}

  // May a retiring page of a range stay behind its piece, for a cached range?
  bool may_keep(const Range& range, std::size_t piece) const;
  // Makes a cached range of a closed range's addresses, once no retirement and no window needs them, if pages are kept
  // there.
  void keep_closed(Range& range);
  // Takes the addresses of the cached range that fits best; empty where none fits.
  Stretch take(std::size_t pieces, std::size_t expected);

  // Which kept pages may be taken away; each includes those before, and only the last those of ranges that `keep`.
  enum class Take { kUnpromised, kNotAhead, kAll };
  // Takes pages out of cached ranges, the oldest first, then those that ranges have not claimed of theirs, and last
  // what was mapped ahead, until so many are idle, or as far as `take` and the driver let them go.
  void empty(std::size_t idle, Take take);
  // Takes the kept page of a piece away. False where none is kept there, or the driver refuses.
  bool drop(Range& range, std::size_t piece);
  void empty_all() { empty(space_.device.book.created(), Take::kAll); }
  // Has ranges that are closed from here on keep no pages.
  void stop_keeping() { keeping_ = false; }

  // Promises cached ranges to `count` ranges of so many pieces that are about to come; returns how many there are.
  std::size_t promise(std::size_t pieces, std::size_t count);
  // Does a promised one have fewer pages than that?
  bool lacks(std::size_t mapped) const { return lacking(mapped) < cached_.size(); }
  // Takes the fullest of these; empty where there is none.
  Stretch take_lacking(std::size_t mapped);
  // Ends all promises, as no range comes.
  void unpromise();

  std::vector<const Stretch*> stretches() const;
  void check() const;  // throws InvariantBroken

 private:
  struct Cached {
    Stretch addresses;
    bool promised = false;
  };
  std::size_t lacking(std::size_t mapped) const;
  Stretch take_at(std::size_t index);
  void empty(Stretch& stretch, std::size_t idle, bool ahead);

  AddressSpace& space_;
  bool keeping_ = true;
  std::deque<Cached> cached_;  // the oldest first
};

}  // namespace ballonet
