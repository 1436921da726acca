#include "mapping/cached_ranges.h"

#include <algorithm>
#include <cassert>
#include <utility>

namespace ballonet {

bool CachedRanges::may_keep(const Range& range, std::size_t index) const {
  const Piece& piece = range.addresses[index];
  return keeping_ && (range.closed ? range.owner == Owner::kKv : range.keeps) &&
         piece.retiring_from == LeadsTo::kDevice && piece.open && space_.device.book.mappings(piece.page) == 1 &&
         !space_.device.above_budget();
}

void CachedRanges::keep_closed(Range& range) {
  if (!range.closed || range.windows != 0 || range.addresses.in_use()) return;
  if (range.addresses.kept() == 0) return space_.free(range.addresses);
  cached_.push_back({std::exchange(range.addresses, {})});
}

Stretch CachedRanges::take(std::size_t pieces, std::size_t expected) {
  std::vector<CachedSize> sizes;
  for (const Cached& each : cached_) sizes.push_back({each.addresses.pieces, each.addresses.kept()});
  const std::size_t best = best_fit(sizes, pieces, expected);
  return best == kNoFit ? Stretch{} : take_at(best);
}

Stretch CachedRanges::take_at(std::size_t index) {
  Stretch taken = std::move(cached_[index].addresses);
  cached_.erase(cached_.begin() + static_cast<std::ptrdiff_t>(index));
  return taken;
}

// Takes kept pages away, those that were mapped ahead or the others, until so many pages are idle.
void CachedRanges::empty(Stretch& stretch, std::size_t idle, bool ahead) {
  const auto left = [&] { return ahead ? stretch.ahead() : stretch.kept() - stretch.ahead(); };
  for (std::size_t i = stretch.size(); i-- > 0 && left() > 0 && space_.device.book.idle() < idle;) {
    if (stretch[i].leads_to != LeadsTo::kKept || stretch[i].ahead != ahead) continue;
    if (!space_.vacate(stretch, i)) space_.vacate(stretch, i);
  }
}

void CachedRanges::empty(std::size_t idle, Take take) {
  assert(space_.mutex.held());
  const Pool& device = space_.device;
  for (const bool ahead : {false, true}) {
    if (ahead && take != Take::kAll) break;
    for (auto each = cached_.begin(); each != cached_.end() && device.book.idle() < idle;) {
      if (take != Take::kUnpromised || !each->promised) empty(each->addresses, idle, ahead);
      if (each->addresses.kept() == 0) space_.free(each->addresses);
      each = each->addresses.pieces == 0 ? cached_.erase(each) : std::next(each);
    }
    for (auto range = space_.ranges.begin();
         range != space_.ranges.end() && device.book.kept() > 0 && device.book.idle() < idle; ++range) {
      if (take == Take::kAll || !(*range)->keeps) empty((*range)->addresses, idle, ahead);
    }
  }
}

bool CachedRanges::drop(Range& range, std::size_t piece) {
  range.check_span(piece, 1);
  return range.addresses[piece].leads_to == LeadsTo::kKept && space_.vacate(range.addresses, piece);
}

std::size_t CachedRanges::promise(std::size_t pieces, std::size_t count) {
  std::vector<CachedSize> sizes;
  for (Cached& each : cached_) {
    sizes.push_back({each.addresses.pieces, each.addresses.kept()});
    each.promised = false;
  }
  const std::vector<std::size_t> chosen = promised_for(sizes, pieces, count);
  for (std::size_t i : chosen) cached_[i].promised = true;
  return chosen.size();
}

std::size_t CachedRanges::lacking(std::size_t mapped) const {
  std::size_t found = cached_.size();
  for (std::size_t i = 0; i < cached_.size(); ++i) {
    if (!cached_[i].promised || cached_[i].addresses.kept() >= mapped) continue;
    if (found == cached_.size() || cached_[i].addresses.kept() > cached_[found].addresses.kept()) found = i;
  }
  return found;
}

Stretch CachedRanges::take_lacking(std::size_t mapped) { return lacks(mapped) ? take_at(lacking(mapped)) : Stretch{}; }

void CachedRanges::unpromise() {
  for (Cached& each : cached_) {
    each.promised = false;
    for (std::size_t i = 0; each.addresses.ahead() > 0; ++i) space_.table.forget_ahead(each.addresses, i);
  }
}

std::vector<const Stretch*> CachedRanges::stretches() const {
  std::vector<const Stretch*> all;
  for (const Cached& each : cached_) all.push_back(&each.addresses);
  return all;
}

void CachedRanges::check() const {
  for (const Cached& each : cached_) {
    if (each.addresses.in_use() || each.addresses.kept() == 0)
      throw InvariantBroken("a cached range holds other pages than kept ones");
  }
}

}  // namespace ballonet
