#include "slots.h"

#include <algorithm>
#include <cassert>
#include <utility>

#include "slot_fit.h"

namespace ballonet {

bool Slots::may_keep(const Range& range, std::size_t index) const {
  const Piece& piece = range.held[index];
  return keeping_ && (range.closed || range.keeps) && range.owner == Owner::kKv &&
         piece.retiring_from == Backing::kDevice && piece.open && space_.device.book.mappings(piece.page) == 1 &&
         !space_.device.above_budget();
}

void Slots::keep_closed(Range& range) {
  if (!range.closed || range.windows != 0 || range.held.in_use()) return;
  if (range.held.kept() == 0) return space_.free(range.held);
  slots_.push_back({std::exchange(range.held, {})});
}

Stretch Slots::take(std::size_t pieces, std::size_t expected) {
  std::vector<SlotSize> sizes;
  for (const Slot& slot : slots_) sizes.push_back({slot.held.pieces, slot.held.kept()});
  const std::size_t best = best_fit(sizes, pieces, expected);
  return best == kNoSlot ? Stretch{} : take_at(best);
}

Stretch Slots::take_at(std::size_t index) {
  Stretch taken = std::move(slots_[index].held);
  slots_.erase(slots_.begin() + static_cast<std::ptrdiff_t>(index));
  return taken;
}

// Takes kept pages away, those that were mapped ahead or the others, until so many pages are idle.
void Slots::empty(Stretch& stretch, std::size_t idle, bool ahead) {
  const auto left = [&] { return ahead ? stretch.ahead() : stretch.kept() - stretch.ahead(); };
  for (std::size_t i = stretch.size(); i-- > 0 && left() > 0 && space_.device.book.idle() < idle;) {
    if (stretch[i].backing != Backing::kKept || stretch[i].ahead != ahead) continue;
    if (!space_.vacate(stretch, i)) space_.vacate(stretch, i);
  }
}

void Slots::empty(std::size_t idle, Take take) {
  assert(space_.mutex.held());
  const Pool& device = space_.device;
  for (const bool ahead : {false, true}) {
    if (ahead && take != Take::kAll) break;
    for (auto slot = slots_.begin(); slot != slots_.end() && device.book.idle() < idle;) {
      if (take != Take::kUnpromised || !slot->promised) empty(slot->held, idle, ahead);
      if (slot->held.kept() == 0) space_.free(slot->held);
      slot = slot->held.pieces == 0 ? slots_.erase(slot) : std::next(slot);
    }
    for (auto range = space_.ranges.begin();
         range != space_.ranges.end() && device.book.kept() > 0 && device.book.idle() < idle; ++range) {
      if (take == Take::kAll || !(*range)->keeps) empty((*range)->held, idle, ahead);
    }
  }
}

bool Slots::drop(Range& range, std::size_t piece) {
  range.check_span(piece, 1);
  return range.held[piece].backing == Backing::kKept && space_.vacate(range.held, piece);
}

std::size_t Slots::promise(std::size_t pieces, std::size_t count) {
  std::vector<SlotSize> sizes;
  for (Slot& slot : slots_) {
    sizes.push_back({slot.held.pieces, slot.held.kept()});
    slot.promised = false;
  }
  const std::vector<std::size_t> chosen = slots_for(sizes, pieces, count);
  for (std::size_t each : chosen) slots_[each].promised = true;
  return chosen.size();
}

std::size_t Slots::lacking(std::size_t mapped) const {
  std::size_t found = slots_.size();
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    if (!slots_[i].promised || slots_[i].held.kept() >= mapped) continue;
    if (found == slots_.size() || slots_[i].held.kept() > slots_[found].held.kept()) found = i;
  }
  return found;
}

Stretch Slots::take_lacking(std::size_t mapped) { return lacks(mapped) ? take_at(lacking(mapped)) : Stretch{}; }

void Slots::unpromise() {
  for (Slot& slot : slots_) {
    slot.promised = false;
    for (std::size_t i = 0; slot.held.ahead() > 0; ++i) space_.table.forget_ahead(slot.held, i);
  }
}

std::vector<const Stretch*> Slots::stretches() const {
  std::vector<const Stretch*> all;
  for (const Slot& slot : slots_) all.push_back(&slot.held);
  return all;
}

void Slots::check() const {
  for (const Slot& slot : slots_) {
    if (slot.held.in_use() || slot.held.kept() == 0) throw InvariantBroken("a slot holds other pages than kept ones");
  }
}

}  // namespace ballonet
