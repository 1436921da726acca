#include "pages/page_table.h"

#include <cassert>

#include "base/errors.h"

namespace ballonet {

const Piece Stretch::kUntouched{};

std::size_t Stretch::backed() const {
  return count(LeadsTo::kDevice) + count(LeadsTo::kHost) + count(LeadsTo::kPeer) + count(LeadsTo::kAlias);
}

Piece& PageTable::at(Stretch& stretch, std::size_t piece) {
  assert(piece < stretch.pieces);
  if (piece >= stretch.table_.size()) stretch.table_.resize(piece + 1);
  return stretch.table_[piece];
}

void PageTable::become(Stretch& stretch, Piece& piece, LeadsTo leads_to) {
  if (piece.leads_to != LeadsTo::kNone) --stretch.counts_[static_cast<std::size_t>(piece.leads_to)];
  if (leads_to != LeadsTo::kNone) ++stretch.counts_[static_cast<std::size_t>(leads_to)];
  piece.leads_to = leads_to;
  piece.changed = ++changes_;
}

void PageTable::lead(Stretch& stretch, std::size_t index, const Target& target) {
  Piece& piece = at(stretch, index);
  assert(piece.leads_to == LeadsTo::kNone && leads_somewhere(target.leads_to));
  piece.page = target.page;
  piece.place = target.place;
  become(stretch, piece, target.leads_to);
}

void PageTable::open(Stretch& stretch, std::size_t index) {
  assert(stretch[index].page != kNoPage);
  at(stretch, index).open = true;
}

void PageTable::clear(Stretch& stretch, std::size_t index) {
  Piece& piece = at(stretch, index);
  assert(piece.leads_to != LeadsTo::kNone);
  const std::uint64_t before = piece.changed;
  const bool retired = piece.leads_to == LeadsTo::kRetiring;
  forget_ahead(stretch, index);
  become(stretch, piece, LeadsTo::kNone);
  if (retired) piece.changed = before;
  piece.page = kNoPage;
  piece.place = Place::kDevice;
  piece.retiring_from = LeadsTo::kNone;
  piece.ticket = 0;
  piece.open = false;
}

bool PageTable::retire(Stretch& stretch, std::size_t index, std::uint32_t ticket) {
  Piece& piece = at(stretch, index);
  assert(leads_somewhere(piece.leads_to) && ticket != 0);
  piece.doomed = piece.pins > 0;
  if (piece.doomed) {
    piece.changed = ++changes_;
    return false;
  }
  piece.retiring_from = piece.leads_to;
  piece.ticket = ticket;
  become(stretch, piece, LeadsTo::kRetiring);
  return true;
}

void PageTable::revive(Stretch& stretch, std::size_t index) {
  Piece& piece = at(stretch, index);
  assert(piece.leads_to == LeadsTo::kRetiring);
  become(stretch, piece, piece.retiring_from);
  piece.retiring_from = LeadsTo::kNone;
  piece.ticket = 0;
}

void PageTable::keep(Stretch& stretch, std::size_t index, bool ahead) {
  Piece& piece = at(stretch, index);
  assert(piece.open && piece.place == Place::kDevice && piece.pins == 0 && !piece.ahead);
  assert(piece.leads_to == LeadsTo::kDevice || piece.retiring_from == LeadsTo::kDevice);
  become(stretch, piece, LeadsTo::kKept);
  piece.retiring_from = LeadsTo::kNone;
  piece.ticket = 0;
  piece.ahead = ahead;
  if (ahead) ++stretch.ahead_, ++ahead_;
}

void PageTable::claim(Stretch& stretch, std::size_t index) {
  assert(stretch[index].leads_to == LeadsTo::kKept);
  forget_ahead(stretch, index);
  become(stretch, at(stretch, index), LeadsTo::kDevice);
}

void PageTable::forget_ahead(Stretch& stretch, std::size_t index) {
  if (!stretch[index].ahead) return;
  at(stretch, index).ahead = false;
  --stretch.ahead_;
  --ahead_;
}

void PageTable::check(const Stretch& stretch) {
  std::array<std::size_t, kLeadsToCount> counts{};
  std::size_t ahead = 0;
  for (std::size_t i = 0; i < stretch.size(); ++i) {
    const Piece& piece = stretch[i];
    const bool none = piece.leads_to == LeadsTo::kNone, kept = piece.leads_to == LeadsTo::kKept;
    const bool retiring = piece.leads_to == LeadsTo::kRetiring;
    if (!none) ++counts[static_cast<std::size_t>(piece.leads_to)];
    ahead += piece.ahead ? 1 : 0;
    const bool at_rest = piece.open && piece.place == Place::kDevice && piece.pins == 0 && !piece.doomed;
    if (none != (piece.page == kNoPage) || (none && piece.open) || (kept && !at_rest) || (piece.ahead && !kept) ||
        retiring != (piece.ticket != 0) || retiring != (piece.retiring_from != LeadsTo::kNone) ||
        (piece.doomed && piece.pins == 0)) {
      throw InvariantBroken(format("piece %zu, which leads to page %u, is in no state that there is", i, piece.page));
    }
  }
  if (counts != stretch.counts_ || ahead != stretch.ahead_)
    throw InvariantBroken("the counts of a stretch of addresses are not those of its pieces");
}

}  // namespace ballonet
