// Which cached range a new range takes (eLLM §4.2.2, best fit), and which are for ranges that are about to come. Pure.
//
// Words
//   cached range   the addresses of a closed range of KV, together with pages that are still mapped there (eLLM's
//                  slot). The pages are free: threads that need pages take them out, and a range that takes the
//                  addresses maps them again without the driver
//
// Lock: the mapper's, held by the caller, as the cached ranges are under it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace ballonet {

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

}  // namespace ballonet
