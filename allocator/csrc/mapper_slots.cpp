// How free pages stay where they are mapped, until someone claims them there or takes them away. See slots.h.
//
// Note [Slots]
// When a range of KV is closed and its pages have retired they are free, but nothing is unmapped: the next range that
// is reserved gets the addresses, and finds its first pages mapped. So a program that serves one request after the
// other comes to call the driver no more. A slot costs nobody anything: its pages count as free, and are taken out, the
// oldest slot's first and the last piece first, before a new page is created. Pages mapped ahead of time are kept in
// the same way, by a range that is in use; they will be claimed within a step of the model, so they go last of all; so
// do those mapped in slots of ranges that are about to come (mapper_coming.cpp).
#include <algorithm>

#include "mapper.h"

namespace ballonet {

bool Mapper::may_keep(const Range& range, const Range::Piece& piece) {
  return keeping_ && !shut_ && range.closed_ && range.owner == Owner::kKv && piece.retiring_from == Backing::kDevice &&
         piece.open && device_.mappings(piece.page) == 1 && !device_.above_budget();
}

// Pre: the piece leads to a page of the device that it alone leads to, and nobody uses it.
void Mapper::keep(Range& range, std::size_t index, bool ahead) {
  Range::Piece& piece = range.at(index);
  piece.backing = Backing::kKept;
  piece.retiring_from = Backing::kNone;
  piece.ticket = 0;
  piece.ahead = ahead;
  piece.changed = ++changes_;
  ++range.held_.kept;
  if (ahead) ++range.held_.ahead, ++ahead_;
  device_.keep(piece.page);
}

void Mapper::claim(Range& range, std::size_t index) {
  forget_ahead(range.held_, index);
  Range::Piece& piece = range.at(index);
  piece.backing = Backing::kDevice;
  piece.changed = ++changes_;
  --range.held_.kept;
  device_.claim(piece.page, range.owner);
}

void Mapper::forget_ahead(Stretch& stretch, std::size_t index) {
  Stretch::Piece& piece = stretch.table[index];
  if (!piece.ahead) return;
  piece.ahead = false;
  --stretch.ahead;
  --ahead_;
}

// Takes a kept page away. False where the driver does not do so now.
bool Mapper::let_go(Stretch& stretch, std::size_t index) {
  if (!driver_.cuMemUnmap(stretch.base + index * page_size, page_size).ok()) return false;
  Stretch::Piece& piece = stretch.table[index];
  const PageId page = piece.page;
  if (piece.ahead) --stretch.ahead, --ahead_;
  --stretch.kept;
  piece = {};
  piece.changed = ++changes_;
  --device_.mappings(page);
  device_.let_go(page);
  return true;
}

void Mapper::unkeep(Range& range, std::size_t index) {
  if (!let_go(range.held_, index) && !let_go(range.held_, index)) {
    throw DriverError("cuMemUnmap", cuda::kOperatingSystem, "a failure",
                      "taking a page that was kept from its address");
  }
}

// Takes kept pages away, those that were mapped ahead or the others, until so many pages are idle.
void Mapper::empty(Stretch& stretch, std::size_t idle, bool ahead) {
  const auto left = [&] { return ahead ? stretch.ahead : stretch.kept - stretch.ahead; };
  for (std::size_t i = stretch.table.size(); i-- > 0 && left() > 0 && device_.idle() < idle;) {
    const Stretch::Piece& piece = stretch.table[i];
    if (piece.backing != Backing::kKept || piece.ahead != ahead) continue;
    if (!let_go(stretch, i)) let_go(stretch, i);
  }
}

// Takes pages out of slots, the oldest first, then those that ranges have not claimed of theirs, and last what was
// mapped ahead, until so many are idle, or as far as `take` and the driver let them go.
void Mapper::empty_slots(std::size_t idle, Take take) {
  for (const bool ahead : {false, true}) {
    if (ahead && take != Take::kAll) break;
    for (auto slot = slots_.begin(); slot != slots_.end() && device_.idle() < idle;) {
      if (take != Take::kUnpromised || !slot->promised) empty(*slot, idle, ahead);
      if (slot->kept == 0) free_addresses(*slot);
      slot = slot->pieces == 0 ? slots_.erase(slot) : std::next(slot);
    }
    for (auto range = ranges_.begin(); range != ranges_.end() && device_.kept() > 0 && device_.idle() < idle; ++range) {
      empty((*range)->held_, idle, ahead);
    }
  }
}

// Makes slots of ranges that are closed and whose retirements have passed, and of nothing else: that takes no driver
// call that is worth mentioning.
void Mapper::shelve_passed(Ranges& done) {
  for (auto each = retiring_.begin(); each != retiring_.end();) {
    std::size_t freed = 0;
    const bool ready = each->range->closed_ && each->range->owner == Owner::kKv && streams_.passed(*each->fence) &&
                       finish_retired(*each, ~std::size_t{0}, freed) == Left::kNone;
    if (ready) done.push_back(std::move(each->range));
    each = ready ? retiring_.erase(each) : std::next(each);
  }
}

// Addresses of the slot that fits best; none where none fits.
Stretch Mapper::slot_for(std::size_t pieces, std::size_t expected) {
  std::vector<SlotSize> sizes;
  for (const Stretch& slot : slots_) sizes.push_back({slot.pieces, slot.kept});
  const std::size_t best = best_fit(sizes, pieces, expected);
  if (best == kNoSlot) return {};
  Stretch taken = std::move(slots_[best]);
  taken.promised = false;
  slots_.erase(slots_.begin() + static_cast<std::ptrdiff_t>(best));
  return taken;
}

}  // namespace ballonet
