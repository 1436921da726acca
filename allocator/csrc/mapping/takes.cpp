#include "mapping/takes.h"

#include <algorithm>
#include <queue>

namespace ballonet {

Examination::Examination(AddressSpace& space, const Copies& copies, const Takeable& takeable)
    : space_(space), copies_(copies), takeable_(takeable) {
  for (const Takeable::Part& part : takeable.parts) ends_.push_back({part.range.lock(), part.twin.lock(), part.buffer});
}

Room room_for_twins(const AddressSpace& space) {
  return {space.context.host_pages ? space.host.available() : 0, space.peer.available()};
}

bool Examination::admissible() const {
  for (std::size_t i = 0; i < ends_.size(); ++i) {
    if (!ends_[i].open()) return false;
    const Takeable::Part& part = takeable_.parts[i];
    const Range& range = *ends_[i].range;
    const Range* twin = ends_[i].twin.get();
    if (space_.ranges.count(ends_[i].range.get()) == 0 || (twin && space_.ranges.count(ends_[i].twin.get()) == 0)) {
      throw UsageError("a range of another device");
    }
    if (!range.group || range.group != takeable_.group) throw UsageError("the range belongs to another group");
    range.check_span(part.first, part.count);
    if (twin) twin->check_span(part.twin_first, part.count);
    const std::size_t extent = part.count * space_.page_size;
    for (const auto& [offset, from, size] : part.sources) {
      if (offset > extent || size > extent - offset) {
        throw UsageError(format("%zu bytes at %zu lie outside a part of %zu bytes", size, offset, extent));
      }
    }
    if (!sources_there(i)) throw UsageError("a source lies neither in registered memory nor in its part");
  }
  return true;
}

Taken Examination::outcome() const {
  std::size_t pages = 0, lacking = 0;
  bool later = false, kv = true;
  Shared known = shared();
  for (std::size_t i = 0; i < ends_.size(); ++i) {
    const Takeable::Part& part = takeable_.parts[i];
    const bool fits = ends_[i].open() && unchanged(i, takeable_.as_of) && part_still_valid(i, known);
    if (!fits || !sources_there(i)) return {Taken::Fate::kVoid, 0};
    kv &= ends_[i].range->owner == Owner::kKv;
    for (std::size_t piece = part.first; piece < part.first + part.count; ++piece) {
      const Piece& here = ends_[i].range->addresses[piece];
      if (here.leads_to == LeadsTo::kDevice) ++pages;
      if (part.buffer || here.leads_to == LeadsTo::kAlias) {
        ++known[here.page];
        later |= part.buffer && here.pins > 0;
        continue;
      }
      const Piece& there = ends_[i].twin->addresses[twin_of(i, piece)];
      if (!leads_somewhere(there.leads_to)) ++lacking;
      later |= there.leads_to == LeadsTo::kDevice || space_.pool(here.place).book.mappings(here.page) != 1;
    }
  }
  for (const auto& [page, mappings] : known) later |= space_.device.book.mappings(page) != mappings;
  Taken found{Taken::Fate::kTaken, pages, lacking, kv};
  if (later || pages == 0 || !room_for_twins(space_).holds(found)) found.fate = Taken::Fate::kLater;
  return found;
}

Takeable Examination::first_of(std::size_t most, Room room) const {
  using Next = std::pair<std::size_t, std::size_t>;  // a piece, and the part that it belongs to
  std::priority_queue<Next, std::vector<Next>, std::greater<Next>> next;
  for (std::size_t i = 0; i < ends_.size(); ++i) {
    if (ends_[i].open() && takeable_.parts[i].count > 0) next.push({takeable_.parts[i].first, i});
  }
  std::vector<std::vector<std::size_t>> chosen(ends_.size());
  while (!next.empty() && most > 0) {
    const auto [piece, i] = next.top();
    next.pop();
    if (can_take_piece(i, piece)) {
      const std::size_t lacking = leads_somewhere(ends_[i].twin->addresses[twin_of(i, piece)].leads_to) ? 0 : 1;
      if (room.holds({Taken::Fate::kTaken, 1, lacking, ends_[i].range->owner == Owner::kKv})) {
        chosen[i].push_back(piece);
        --most;
      }
    }
    if (piece + 1 < takeable_.parts[i].first + takeable_.parts[i].count) next.push({piece + 1, i});
  }
  Takeable found{takeable_.group, {}, takeable_.as_of};
  for (std::size_t i = 0; i < ends_.size(); ++i) {
    const Takeable::Part& part = takeable_.parts[i];
    const std::size_t before = found.parts.size();
    for (std::size_t piece : chosen[i]) {
      if (found.parts.size() > before && found.parts.back().first + found.parts.back().count == piece) {
        ++found.parts.back().count;
      } else {
        found.parts.push_back({part.range, piece, 1, part.twin, twin_of(i, piece), {}, false});
      }
    }
  }
  return found;
}

// Is this piece of a divisible entry unchanged, and free to be taken?
bool Examination::can_take_piece(std::size_t part, std::size_t piece) const {
  const Piece& here = ends_[part].range->addresses[piece];
  const Piece& twin = ends_[part].twin->addresses[twin_of(part, piece)];
  if (here.changed > takeable_.as_of || twin.changed > takeable_.as_of || here.doomed || twin.doomed) return false;
  if (here.leads_to != LeadsTo::kDevice || space_.device.book.mappings(here.page) != 1) return false;
  return twin.leads_to != LeadsTo::kAlias && twin.leads_to != LeadsTo::kDevice;
}

Examination::Shared Examination::shared() const {
  Shared shared;
  for (std::size_t i = 0; i < ends_.size(); ++i) {
    const Takeable::Part& part = takeable_.parts[i];
    for (std::size_t n = 0; part.buffer && ends_[i].open() && n < part.count; ++n) {
      const Piece& piece = ends_[i].range->addresses[part.first + n];
      if (piece.leads_to == LeadsTo::kDevice) shared.emplace(piece.page, 0);
    }
  }
  return shared;
}

bool Examination::unchanged(std::uint64_t as_of) const {
  for (std::size_t i = 0; i < ends_.size(); ++i) {
    if (!ends_[i].open() || !unchanged(i, as_of)) return false;
  }
  return true;
}

bool Examination::unchanged(std::size_t part, std::uint64_t as_of) const {
  const auto& [shown, first, count, twin, twin_first, sources, buffer] = takeable_.parts[part];
  for (std::size_t i = 0; i < count; ++i) {
    if (ends_[part].range->addresses[first + i].changed > as_of) return false;
    if (!buffer && ends_[part].twin->addresses[twin_first + i].changed > as_of) return false;
  }
  return true;
}

// Are these pages as Note [Void] describes them? Pieces that lead to a buffer have their bytes in the backing range
// already.
bool Examination::part_still_valid(std::size_t index, const Shared& shared) const {
  const Takeable::Part& part = takeable_.parts[index];
  for (std::size_t i = 0; i < part.count; ++i) {
    const Piece& piece = ends_[index].range->addresses[part.first + i];
    if (piece.doomed) return false;
    if (part.buffer) {
      if (piece.leads_to != LeadsTo::kDevice) return false;
      continue;
    }
    const Piece& there = ends_[index].twin->addresses[part.twin_first + i];
    if (there.doomed || there.leads_to == LeadsTo::kAlias) return false;
    if (piece.leads_to == LeadsTo::kAlias) {
      const bool to_a_buffer = piece.place == Place::kDevice && shared.count(piece.page) > 0;
      if (!to_a_buffer || !has_own_page(there.leads_to)) return false;
    } else if (!has_own_page(piece.leads_to)) {
      return false;
    }
  }
  return true;
}

bool Examination::sources_there(std::size_t index) const {
  const Takeable::Part& part = takeable_.parts[index];
  const CUdeviceptr begin = ends_[index].range->base + part.first * space_.page_size;
  const CUdeviceptr end = begin + part.count * space_.page_size;
  return std::all_of(part.sources.begin(), part.sources.end(), [&](const Takeable::Source& source) {
    const bool own = source.address >= begin && source.address < end && source.size <= end - source.address;
    return own || copies_.registered(source.address, source.size);
  });
}

bool Examination::broken() const {
  const auto there = [&](std::size_t i) { return ends_[i].open() && unchanged(i, takeable_.as_of); };
  const Shared known = shared();
  // What leads to a buffer that has changed is no longer what it was.
  for (std::size_t i = 0; i < ends_.size(); ++i) {
    if (ends_[i].buffer && !there(i)) return false;
  }
  for (std::size_t i = 0; i < ends_.size(); ++i) {
    if (there(i) && !part_still_valid(i, known)) return true;
  }
  return false;
}

bool Takes::admit(Takeable& takeable) {
  const Examination examined(space_, copies_, takeable);
  const std::lock_guard lock(space_.mutex);
  if (!examined.admissible()) return false;
  takeable.as_of = space_.table.changes();
  return examined.outcome().fate != Taken::Fate::kVoid;
}

Taken Takes::outlook(const Takeable& takeable) {
  const Examination examined(space_, copies_, takeable);
  const std::lock_guard lease(takeable.group->mutex);
  const std::lock_guard lock(space_.mutex);
  Taken found = examined.outcome();
  if (found.fate != Taken::Fate::kVoid && takeable.group->leased_by_others()) found.fate = Taken::Fate::kLeased;
  return found;
}

Takeable Takes::first_of(const Takeable& takeable, std::size_t most, Room room) {
  const Examination examined(space_, copies_, takeable);
  const std::lock_guard lock(space_.mutex);
  return examined.first_of(most, room);
}

Room Takes::room() {
  const std::lock_guard lock(space_.mutex);
  return room_for_twins(space_);
}

void Takes::check(const Takeable& takeable) {
  const Examination examined(space_, copies_, takeable);
  const std::lock_guard lock(space_.mutex);
  if (examined.broken())
    throw InvariantBroken("pages that may be taken are not what they were, and nobody has changed them");
}

Taken Takes::take(Takeable& takeable, bool near) {
  const Examination examined(space_, copies_, takeable);
  const std::lock_guard lease(takeable.group->mutex);
  if (takeable.group->leased_by_others()) return {Taken::Fate::kLeased, 0};
  Section in(space_);
  Taken found = examined.outcome();
  if (found.fate != Taken::Fate::kTaken) return found;
  const std::size_t on_host = found.lacking - (near && found.kv ? std::min(found.lacking, space_.peer.available()) : 0);
  if (on_host > 0) space_.prepare(in, Place::kHost, on_host);
  if (!fences_.quiesce(in)) return {Taken::Fate::kLater, 0};
  retirement_.reap(in);
  found = examined.outcome();
  if (found.fate != Taken::Fate::kTaken) return found;

  Fillings fillings;
  const std::size_t on_peer = near && found.kv && found.lacking > 0 ? space_.peer.prepare(found.lacking) : 0;
  if (!plan(takeable, examined, on_peer, fillings)) return {Taken::Fate::kLater, 0};
  std::uint64_t filled_as_of = space_.table.changes();  // later changes are other threads'
  bool intact = true;
  try {
    back(fillings);
    filled_as_of = space_.table.changes();
    try {
      copy_in(in, fillings);
    } catch (...) {
      intact = examined.unchanged(filled_as_of);
      throw;
    }
    intact = examined.unchanged(filled_as_of);
    if (!intact) {
      drop(fillings, filled_as_of);
      return {Taken::Fate::kVoid, 0};
    }
    lead_to_twins(takeable, examined);
  } catch (...) {
    drop(fillings, intact ? space_.table.changes() : filled_as_of);
    if (intact) takeable.as_of = space_.table.changes();  // all that changed has been undone
    retirement_.reap(in);
    throw;
  }
  return found;
}

// Plans the pages that backing ranges lack: the peer's as far as they go, then the host's. False where a piece is
// retiring.
bool Takes::plan(const Takeable& takeable, const Examination& examined, std::size_t on_peer, Fillings& fillings) {
  for (std::size_t i = 0; i < takeable.parts.size(); ++i) {
    const Examination::Ends& ends = examined.ends()[i];
    if (ends.buffer) continue;
    std::size_t next = 0;
    for (const Place place : {Place::kPeer, Place::kHost}) {
      const std::size_t most = place == Place::kPeer ? on_peer : ~std::size_t{0};
      Filling filling = filling_of(takeable.parts[i], ends, place, next, most);
      for (std::size_t piece : filling.pieces) {
        if (filling.twin.addresses[piece].leads_to == LeadsTo::kKept) space_.vacate(filling.twin.addresses, piece);
        if (filling.twin.addresses[piece].leads_to != LeadsTo::kNone) return false;
      }
      if (place == Place::kPeer) on_peer -= filling.pieces.size();
      if (!filling.pieces.empty()) fillings.push_back(std::move(filling));
    }
  }
  return true;
}

// Returns the copies that fill at most `most` pages of `to_place` for the pieces from `next` on; `next` ends behind the
// last one seen.
Takes::Filling Takes::filling_of(const Takeable::Part& part, const Examination::Ends& ends, Place to_place,
                                 std::size_t& next, std::size_t most) const {
  Filling filling{*ends.range, *ends.twin, to_place, {}, {}};
  const std::size_t page_size = space_.page_size;
  const CUdeviceptr from = space_.address(ends.range->addresses, part.first);
  const CUdeviceptr to = space_.address(ends.twin->addresses, part.twin_first);
  const auto lacks = [&](std::size_t i) {
    return i < part.count && filling.pieces.size() < most &&
           !leads_somewhere(ends.twin->addresses[part.twin_first + i].leads_to);
  };
  const auto place = [&](std::size_t i) { return ends.range->addresses[part.first + i].place; };
  std::size_t& i = next;
  while (i < part.count && filling.pieces.size() < most) {
    const std::size_t first_piece = i, begin = i * page_size;
    // A copy reads pages of one place: a driver tells from its address what it is a copy of.
    for (; lacks(i) && place(i) == place(first_piece); ++i) filling.pieces.push_back(part.twin_first + i);
    const std::size_t end = i * page_size;
    if (begin == end) {
      ++i;
      continue;
    }
    if (part.sources.empty()) filling.copies.push_back({to + begin, from + begin, end - begin});
    for (const Takeable::Source& source : part.sources) {
      const std::size_t first = std::max(begin, source.offset), last = std::min(end, source.offset + source.size);
      if (first < last) filling.copies.push_back({to + first, source.address + first - source.offset, last - first});
    }
  }
  return filling;
}

// Gives the pieces pages. After a failure some have one.
void Takes::back(const Fillings& fillings) {
  for (const auto& [range, twin, place, pieces, copies] : fillings) {
    const PageId hint = mapping_.hint_for(twin, pieces.front(), place);
    mapping_.back(twin, pieces, place, space_.pool(place).take(pieces.size(), twin.owner, hint));
  }
}

// Copies into the pieces and waits for that without the lock. After a failure no copy runs.
void Takes::copy_in(Section& in, const Fillings& fillings) {
  if (fillings.empty()) return;
  const CUstream stream = space_.context.copy_stream;
  try {
    for (const Filling& filling : fillings) {
      for (const Copy& copy : filling.copies) {
        space_.driver.cuMemcpyAsync(copy.to, copy.from, copy.size, stream).or_throw("filling a twin");
      }
    }
    Unlocked unlocked(in.lock);
    space_.driver.cuStreamSynchronize(stream).or_throw("waiting for a twin");
  } catch (...) {
    // A driver that refuses again and again has lost its context, and all memory.
    Unlocked unlocked(in.lock);
    for (int attempt = 0; attempt < 4 && !space_.driver.cuStreamSynchronize(stream).ok();) ++attempt;
    throw;
  }
  for (const Filling& filling : fillings) {
    const Range& range = filling.range;
    const CUdeviceptr end = range.base + range.pieces * space_.page_size;
    for (const Copy& copy : filling.copies) {
      if (copy.from < range.base || copy.from >= end) continue;
      const Place from = range.addresses[(copy.from - range.base) / space_.page_size].place;
      copies_.count(range.owner, from, filling.place, copy.size);
    }
  }
}

void Takes::lead_to_twins(const Takeable& takeable, const Examination& examined) {
  std::vector<Change> changes;
  for (std::size_t i = 0; i < takeable.parts.size(); ++i) {
    const Takeable::Part& part = takeable.parts[i];
    const Examination::Ends& ends = examined.ends()[i];
    changes.push_back({*ends.range, part.first, std::vector<Target>(part.count)});
    for (std::size_t n = 0; !ends.buffer && n < part.count; ++n) {
      const Piece& shown = ends.twin->addresses[part.twin_first + n];
      changes.back().targets[n] = {shown.page, LeadsTo::kAlias, shown.place};
    }
  }
  exchange_pages(space_, changes);
}

// Retires new pages of backing ranges, but for pieces that other threads have changed since.
void Takes::drop(const Fillings& fillings, std::uint64_t as_of) {
  for (const Filling& filling : fillings) {
    Spans given;
    for (std::size_t piece : filling.pieces) {
      if (filling.twin.addresses[piece].changed <= as_of) given.push_back({piece, 1});
    }
    retirement_.retire(filling.twin, given);
  }
}

}  // namespace ballonet
