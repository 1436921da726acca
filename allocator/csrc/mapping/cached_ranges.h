// Free pages that stay where they are mapped, until a mapping claims them there or they are taken away.
//
// Note [Cached ranges]
// When a range of KV is closed and its pages have retired they are free, but nothing is unmapped: the next range that
// is reserved gets the addresses, and finds its first pages mapped. So a program that serves one request after the
// other comes to call the driver no more. Such a cached range (eLLM: slot) costs nothing: its pages count as free, and
// are taken out, those of the oldest first and the last piece first, before a new page is created. Pages mapped ahead
// of time are kept in the same way, by a range that is in use; they will be claimed within a step of the model, so they
// go last of all; so do those mapped in cached ranges for ranges that are about to come (mapper.h).
//
// A range that `keeps` does so while it is open: pages that some of its users give back the next ones claim, or new
// weights in the place of those before. As these come again and again, its pages are taken once no new page can be
// created, but before pages in use are.
//
// Guarantees: in a cached range every page is kept, and there is one; a page that is kept anywhere is free in its pool.
//
// Lock: the mapper's, held by the caller.
#pragma once

#include <algorithm>
#include <cstddef>
#include <deque>
#include <vector>

#include "mapping/address_space.h"

namespace ballonet {

// Which cached range a new range takes (eLLM §4.2.2, best fit), and which are for ranges that are about to come. Pure.
//
// Words
//   cached range   the addresses of a closed range of KV, together with pages that are still mapped there (eLLM's
//                  slot). The pages are free: threads that need pages take them out, and a range that takes the
//                  addresses maps them again without the driver
//
// Lock: the mapper's, held by the caller, as the cached ranges are under it.

struct CachedSize {
  std::size_t pieces;  // that its addresses are for
  std::size_t mapped;  // of these, with a page
};

constexpr std::size_t kNoFit = ~std::size_t{0};

// Returns the cached range for a range of `pieces` pieces of which `expected` will be mapped soon: among those whose
// addresses suffice the smallest that has as many pages mapped, else the largest, the rest of which is mapped on
// demand. Sizes are compared by pages, then by addresses; of equal ones it is the last. kNoFit where no addresses
// suffice.
inline std::size_t best_fit(const std::vector<CachedSize>& cached, std::size_t pieces, std::size_t expected) {
  const auto better = [&](const CachedSize& one, const CachedSize& other) {
    const bool fits = one.mapped >= expected, other_fits = other.mapped >= expected;
    if (fits != other_fits) return fits;
    if (one.mapped != other.mapped) return (one.mapped < other.mapped) == fits;
    return one.pieces <= other.pieces;
  };
  std::size_t best = kNoFit;
  for (std::size_t i = 0; i < cached.size(); ++i) {
    if (cached[i].pieces < pieces) continue;
    if (best == kNoFit || better(cached[i], cached[best])) best = i;
  }
  return best;
}

// Returns the cached ranges that so many ranges of `pieces` pieces will take: those whose addresses suffice, at most
// `count`, the fullest first, of equal ones the last.
inline std::vector<std::size_t> promised_for(const std::vector<CachedSize>& cached, std::size_t pieces,
                                             std::size_t count) {
  std::vector<std::size_t> fitting;
  for (std::size_t i = cached.size(); i-- > 0;) {
    if (cached[i].pieces >= pieces) fitting.push_back(i);
  }
  std::stable_sort(fitting.begin(), fitting.end(),
                   [&](std::size_t one, std::size_t other) { return cached[one].mapped > cached[other].mapped; });
  fitting.resize(std::min(fitting.size(), count));
  return fitting;
}

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
