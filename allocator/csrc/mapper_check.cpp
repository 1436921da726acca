// What must be true of pools, ranges and mappings together.
#include <algorithm>

#include "mapper.h"

namespace ballonet {

void Mapper::check() {
  std::lock_guard<std::mutex> lock(mutex);
  for (const Pool* pool : {&device_, &host_, &peer_}) pool->check();
  std::map<std::pair<Pool*, PageId>, unsigned> seen, owned;
  std::set<PageId> kept;
  std::size_t ahead = 0;
  // That a kept page is mapped once is in the pool's book.
  const auto check_kept = [&](const Stretch& stretch) {
    std::size_t pieces = 0;
    for (const Range::Piece& piece : stretch.table) {
      if (piece.backing != Backing::kKept) continue;
      ++pieces;
      ahead += piece.ahead ? 1 : 0;
      if (!kept.insert(piece.page).second || !device_.kept(piece.page) || piece.place != Place::kDevice || !piece.open)
        throw InvariantBroken(format("page %u is not kept as a piece says", piece.page));
    }
    if (pieces != stretch.kept) throw InvariantBroken(format("%zu pieces are kept, not %zu", pieces, stretch.kept));
  };
  for (const Stretch& slot : slots_) check_kept(slot);
  for (Range* range : ranges_) {
    check_kept(range->held_);
    for (std::size_t i = 0; i < range->held_.table.size(); ++i) {
      const Range::Piece& piece = range->held_.table[i];
      if (piece.backing == Backing::kKept) continue;
      if (piece.backing == Backing::kNone) {
        if (piece.page != kNoPage) throw InvariantBroken(format("unbacked piece %zu names page %u", i, piece.page));
        continue;
      }
      Pool* pool = &pool_of(piece);
      ++seen[{pool, piece.page}];
      const bool retiring = piece.backing == Backing::kRetiring;
      if ((retiring ? piece.retiring_from : piece.backing) == Backing::kAlias) continue;
      ++owned[{pool, piece.page}];
      if (pool->owner(piece.page) != (retiring ? Owner::kRetiring : range->owner)) {
        throw InvariantBroken(format("page %u behind piece %zu has another owner than its range", piece.page, i));
      }
    }
  }
  if (kept.size() != device_.kept() || ahead != ahead_ || ahead > ahead_limit())
    throw InvariantBroken("the pages that are kept do not add up");
  if (scratch_pool_ != nullptr) ++seen[{scratch_pool_, scratch_page_}], ++owned[{scratch_pool_, scratch_page_}];
  for (const auto& [key, mappings] : seen) {
    if (key.first->mappings(key.second) != mappings) {
      throw InvariantBroken(format("page %u is mapped %u times, its book says %u", key.second, mappings,
                                   key.first->mappings(key.second)));
    }
  }
  for (const auto& [key, owners] : owned) {
    if (owners != 1) throw InvariantBroken(format("page %u is behind %u pieces that own it", key.second, owners));
  }
  for (Pool* pool : {&device_, &host_, &peer_}) {
    const std::size_t used = pool->created() - pool->count(Owner::kFree);
    const auto backed =
        std::count_if(seen.begin(), seen.end(), [pool](const auto& entry) { return entry.first.first == pool; });
    if (used != static_cast<std::size_t>(backed)) {
      throw InvariantBroken(
          format("%zu pages have an owner, %zu are behind an address", used, static_cast<std::size_t>(backed)));
    }
  }
}

}  // namespace ballonet
