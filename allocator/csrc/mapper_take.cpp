// How the pages of a layer, say, are taken while it is in use, and nobody's pointer moves.
//
// Note [Taking]
// The addresses of what is taken lead to its twin afterwards: slower, and valid throughout. Its bytes are in the twin
// already ("clean"), or they come from where its sources say, or from its own pages; then everything is led there at
// once, and the pages are free. It happens while nothing that was submitted still runs and no other thread holds a
// lease, on whatever thread needs pages, which holds the group's lock throughout: see Note [Waiting] in mapper.h. A
// failure in the middle leaves all as it was: the pages that the twin was given for it retire.
//
// Note [Void]
// Who publishes what may be taken describes pieces as they are at that moment: those of the home have pages of their
// own and hold what they should, those of the twin are backed and hold the same, or are not backed. Any change after it
// may make this wrong: a twin that was just mapped holds nothing yet. So each piece says when it last came to lead
// elsewhere, and what was admitted before that is void. A piece that was only moved to another page holds the same
// bytes, which is no change.
//
// Note [Buffers]
// A buffer that layers take turns in holds the bytes of one of them, and the addresses of all of them lead to it. Each
// has its bytes in its twin throughout, so the buffer may go as well: all addresses that lead to its pages are led to
// their own twins, at once, and nothing is copied. Its own addresses lead nowhere afterwards, as nobody but copies uses
// them: whoever submits one holds a lease, and looks first. An entry that does not name every address that leads to a
// page of its buffer is passed over.
#include <algorithm>
#include <queue>

#include "mapper.h"

namespace ballonet {

std::vector<Mapper::Ends> Mapper::ends_of(const Takeable& takeable) {
  std::vector<Ends> ends;
  for (const Takeable::Part& part : takeable.parts) ends.push_back({part.home.lock(), part.twin.lock(), part.buffer});
  return ends;
}

bool Mapper::admit(Takeable& takeable) {
  const std::vector<Ends> ends = ends_of(takeable);
  std::lock_guard<std::mutex> lock(mutex);
  for (std::size_t i = 0; i < ends.size(); ++i) {
    if (!ends[i].open()) return false;
    const Takeable::Part& part = takeable.parts[i];
    Range& home = *ends[i].home;
    Range* twin = ends[i].twin.get();
    if (home.mapper.get() != this || (twin && twin->mapper.get() != this)) {
      throw UsageError("a range of another device");
    }
    if (!home.group || home.group != takeable.group) throw UsageError("the range belongs to another group");
    check_span(home, part.first, part.count);
    if (twin) check_span(*twin, part.twin_first, part.count);
    const std::size_t extent = part.count * page_size;
    for (const auto& [offset, from, size] : part.sources) {
      if (offset > extent || size > extent - offset) {
        throw UsageError(format("%zu bytes at %zu lie outside a part of %zu bytes", size, offset, extent));
      }
    }
    if (!sources_there(part, home)) throw UsageError("a source lies neither in registered memory nor in its part");
  }
  takeable.as_of = changes_;
  return examine(takeable, ends).fate != Taken::Fate::kVoid;
}

Taken Mapper::outlook(const Takeable& takeable) {
  const std::vector<Ends> ends = ends_of(takeable);
  std::lock_guard<std::mutex> lease(takeable.group->mutex);
  std::lock_guard<std::mutex> lock(mutex);
  Taken found = examine(takeable, ends);
  if (found.fate != Taken::Fate::kVoid && takeable.group->leased_by_others()) found.fate = Taken::Fate::kLeased;
  return found;
}

// Pre: the caller holds the lock.
Taken Mapper::examine(const Takeable& takeable, const std::vector<Ends>& ends) {
  std::size_t pages = 0, lacking = 0;
  bool later = false, kv = true;
  Shared shared = shared_by(takeable, ends);
  for (std::size_t i = 0; i < ends.size(); ++i) {
    const Takeable::Part& part = takeable.parts[i];
    const bool fits = ends[i].open() && unchanged(part, ends[i], takeable.as_of) && sound(part, ends[i], shared);
    if (!fits || !sources_there(part, *ends[i].home)) return {Taken::Fate::kVoid, 0};
    kv &= ends[i].home->owner == Owner::kKv;
    for (std::size_t n = 0; n < part.count; ++n) {
      const Range::Piece& piece = ends[i].home->at(part.first + n);
      if (piece.backing == Backing::kDevice) ++pages;
      if (part.buffer || piece.backing == Backing::kAlias) {
        ++shared[piece.page];
        later |= part.buffer && piece.pins > 0;
        continue;
      }
      const Range::Piece& there = ends[i].twin->at(part.twin_first + n);
      if (!leads_somewhere(there.backing)) ++lacking;
      later |= there.backing == Backing::kDevice || pool_of(piece).mappings(piece.page) != 1;
    }
  }
  for (const auto& [page, mappings] : shared) later |= device_.mappings(page) != mappings;
  Taken found{Taken::Fate::kTaken, pages, lacking, kv};
  if (later || pages == 0 || !room_for_twins_locked().holds(found)) found.fate = Taken::Fate::kLater;
  return found;
}

Takeable Mapper::first_of(const Takeable& takeable, std::size_t most, Room room) {
  using Next = std::pair<std::size_t, std::size_t>;  // a piece, and the part that it belongs to
  const std::vector<Ends> ends = ends_of(takeable);
  std::priority_queue<Next, std::vector<Next>, std::greater<Next>> next;
  for (std::size_t i = 0; i < ends.size(); ++i) {
    if (ends[i].open() && takeable.parts[i].count > 0) next.push({takeable.parts[i].first, i});
  }
  std::vector<std::vector<std::size_t>> chosen(ends.size());
  std::lock_guard<std::mutex> lock(mutex);
  while (!next.empty() && most > 0) {
    const auto [piece, i] = next.top();
    next.pop();
    const Takeable::Part& part = takeable.parts[i];
    const std::size_t twin_piece = part.twin_first + piece - part.first;
    if (goes(ends[i], piece, twin_piece, takeable.as_of)) {
      const std::size_t lacking = leads_somewhere(ends[i].twin->at(twin_piece).backing) ? 0 : 1;
      if (room.holds({Taken::Fate::kTaken, 1, lacking, ends[i].home->owner == Owner::kKv})) {
        chosen[i].push_back(piece);
        --most;
      }
    }
    if (piece + 1 < part.first + part.count) next.push({piece + 1, i});
  }
  Takeable found{takeable.group, {}, takeable.as_of};
  for (std::size_t i = 0; i < ends.size(); ++i) {
    const Takeable::Part& part = takeable.parts[i];
    const std::size_t before = found.parts.size();
    for (std::size_t piece : chosen[i]) {
      if (found.parts.size() > before && found.parts.back().first + found.parts.back().count == piece) {
        ++found.parts.back().count;
      } else {
        found.parts.push_back({part.home, piece, 1, part.twin, part.twin_first + piece - part.first, {}, false});
      }
    }
  }
  return found;
}

// Is this piece of a divisible entry what it was, and free to go? Pre: the caller holds the lock.
bool Mapper::goes(const Ends& ends, std::size_t piece, std::size_t twin_piece, std::uint64_t as_of) {
  const Range::Piece &home = ends.home->at(piece), &twin = ends.twin->at(twin_piece);
  if (home.changed > as_of || twin.changed > as_of || home.doomed || twin.doomed) return false;
  if (home.backing != Backing::kDevice || device_.mappings(home.page) != 1) return false;
  return twin.backing != Backing::kAlias && twin.backing != Backing::kDevice;
}

Mapper::Shared Mapper::shared_by(const Takeable& takeable, const std::vector<Ends>& ends) {
  Shared shared;
  for (std::size_t i = 0; i < ends.size(); ++i) {
    const Takeable::Part& part = takeable.parts[i];
    for (std::size_t n = 0; part.buffer && ends[i].open() && n < part.count; ++n) {
      const Range::Piece& piece = ends[i].home->at(part.first + n);
      if (piece.backing == Backing::kDevice) shared.emplace(piece.page, 0);
    }
  }
  return shared;
}

bool Mapper::unchanged(const Takeable& takeable, const std::vector<Ends>& ends, std::uint64_t as_of) {
  for (std::size_t i = 0; i < ends.size(); ++i) {
    if (!ends[i].open() || !unchanged(takeable.parts[i], ends[i], as_of)) return false;
  }
  return true;
}

bool Mapper::unchanged(const Takeable::Part& part, const Ends& ends, std::uint64_t as_of) {
  for (std::size_t i = 0; i < part.count; ++i) {
    if (ends.home->at(part.first + i).changed > as_of) return false;
    if (!part.buffer && ends.twin->at(part.twin_first + i).changed > as_of) return false;
  }
  return true;
}

// Are these pages as Note [Void] wants them? What leads to a buffer has its bytes in its twin already.
bool Mapper::sound(const Takeable::Part& part, const Ends& ends, const Shared& shared) {
  for (std::size_t i = 0; i < part.count; ++i) {
    const Range::Piece& piece = ends.home->at(part.first + i);
    if (piece.doomed) return false;
    if (part.buffer) {
      if (piece.backing != Backing::kDevice) return false;
      continue;
    }
    const Range::Piece& there = ends.twin->at(part.twin_first + i);
    if (there.doomed || there.backing == Backing::kAlias) return false;
    if (piece.backing == Backing::kAlias) {
      const bool to_a_buffer = piece.place == Place::kDevice && shared.count(piece.page) > 0;
      if (!to_a_buffer || !has_own_page(there.backing)) return false;
    } else if (!has_own_page(piece.backing)) {
      return false;
    }
  }
  return true;
}

bool Mapper::sources_there(const Takeable::Part& part, const Range& home) const {
  const CUdeviceptr begin = address(home, part.first), end = address(home, part.first + part.count);
  return std::all_of(part.sources.begin(), part.sources.end(), [&](const Takeable::Source& source) {
    const bool own = source.address >= begin && source.address < end && source.size <= end - source.address;
    return own || registered(source.address, source.size);
  });
}

Taken Mapper::take(Takeable& takeable, bool near) {
  const std::vector<Ends> ends = ends_of(takeable);
  Ranges done;
  std::lock_guard<std::mutex> lease(takeable.group->mutex);
  if (takeable.group->leased_by_others()) return {Taken::Fate::kLeased, 0};
  DriverScope scope(driver_, context_.handle);
  Lock lock(mutex);
  Taken found = examine(takeable, ends);
  if (found.fate != Taken::Fate::kTaken) return found;
  const std::size_t on_host = found.lacking - (near && found.kv ? std::min(found.lacking, peer_.available()) : 0);
  if (on_host > 0) prepare(lock, host_, on_host);
  if (!quiesce(lock)) return {Taken::Fate::kLater, 0};
  reap_locked(done);
  found = examine(takeable, ends);
  if (found.fate != Taken::Fate::kTaken) return found;

  // The peer's pages as far as they go, then the host's.
  std::size_t on_peer = near && found.kv && found.lacking > 0 ? peer_.prepare(found.lacking) : 0;
  std::vector<Filling> fillings;
  std::vector<Change> changes;
  for (std::size_t i = 0; i < ends.size(); ++i) {
    changes.push_back({*ends[i].home, takeable.parts[i].first, {}});
    if (ends[i].buffer) continue;
    std::size_t next = 0;
    for (const Place place : {Place::kPeer, Place::kHost}) {
      const std::size_t most = place == Place::kPeer ? on_peer : ~std::size_t{0};
      Filling filling = filling_of(takeable.parts[i], ends[i], place, next, most);
      for (std::size_t piece : filling.pieces) {
        if (filling.twin.at(piece).backing == Backing::kKept) let_go(filling.twin.held_, piece);
        if (filling.twin.at(piece).backing != Backing::kNone) return {Taken::Fate::kLater, 0};
      }
      if (place == Place::kPeer) on_peer -= filling.pieces.size();
      if (!filling.pieces.empty()) fillings.push_back(std::move(filling));
    }
  }
  std::uint64_t filled_as_of = changes_;  // whatever changed later, somebody else did
  bool intact = true;
  try {
    back(fillings);
    filled_as_of = changes_;
    try {
      copy_in(lock, fillings);
    } catch (...) {
      intact = unchanged(takeable, ends, filled_as_of);
      throw;
    }
    intact = unchanged(takeable, ends, filled_as_of);
    if (!intact) {
      drop(fillings, filled_as_of);
      return {Taken::Fate::kVoid, 0};
    }
    for (std::size_t i = 0; i < ends.size(); ++i) {
      for (std::size_t n = 0; n < takeable.parts[i].count; ++n) {
        if (ends[i].buffer) {
          changes[i].targets.push_back({kNoPage, Backing::kNone, Place::kDevice});
          continue;
        }
        const Range::Piece& shown = ends[i].twin->at(takeable.parts[i].twin_first + n);
        changes[i].targets.push_back({shown.page, Backing::kAlias, shown.place});
      }
    }
    exchange(changes);
  } catch (...) {
    drop(fillings, intact ? changes_ : filled_as_of);
    if (intact) takeable.as_of = changes_;  // all that changed has been undone
    reap_locked(done);
    throw;
  }
  return found;
}

// Of the pieces from `next` on, with so many pages of that place; where it ends is `next` then.
Mapper::Filling Mapper::filling_of(const Takeable::Part& part, const Ends& ends, Place to_place, std::size_t& next,
                                   std::size_t most) {
  Filling filling{*ends.home, *ends.twin, to_place, {}, {}};
  const CUdeviceptr from = address(*ends.home, part.first), to = address(*ends.twin, part.twin_first);
  const auto lacks = [&](std::size_t i) {
    return i < part.count && filling.pieces.size() < most &&
           !leads_somewhere(ends.twin->at(part.twin_first + i).backing);
  };
  const auto place = [&](std::size_t i) { return ends.home->at(part.first + i).place; };
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
void Mapper::back(const std::vector<Filling>& fillings) {
  for (const Filling& filling : fillings) {
    const Backing backing = backing_of(filling.place);
    Pool& pool = pool_of(filling.place);
    const PageId hint = page_after(filling.twin, filling.pieces.front(), backing);
    back(filling.twin, filling.pieces, pool, pool.take(filling.pieces.size(), filling.twin.owner, hint), backing);
  }
}

// Copies into the pieces and waits for that without the lock. After a failure no copy runs.
void Mapper::copy_in(Lock& lock, const std::vector<Filling>& fillings) {
  if (fillings.empty()) return;
  try {
    for (const Filling& filling : fillings) {
      for (const Copy& copy : filling.copies) {
        driver_.cuMemcpyAsync(copy.to, copy.from, copy.size, context_.copy_stream).or_throw("filling a twin");
      }
    }
    Unlocked unlocked(lock);
    driver_.cuStreamSynchronize(context_.copy_stream).or_throw("waiting for a twin");
  } catch (...) {
    // A driver that refuses again and again has lost its context, and all memory.
    Unlocked unlocked(lock);
    for (int attempt = 0; attempt < 4 && !driver_.cuStreamSynchronize(context_.copy_stream).ok();) ++attempt;
    throw;
  }
  for (const Filling& filling : fillings) {
    const CUdeviceptr begin = address(filling.home, 0), end = address(filling.home, filling.home.pieces);
    for (const Copy& copy : filling.copies) {
      if (copy.from < begin || copy.from >= end) continue;
      count_copy(filling.home.owner, filling.home.at((copy.from - begin) / page_size).place, filling.place, copy.size);
    }
  }
}

// Retires what twins were given, but for pieces that somebody else has changed since.
void Mapper::drop(const std::vector<Filling>& fillings, std::uint64_t as_of) {
  for (const Filling& filling : fillings) {
    Spans given;
    for (std::size_t piece : filling.pieces) {
      if (filling.twin.at(piece).changed <= as_of) given.push_back({piece, 1});
    }
    retire_locked(filling.twin, given);
  }
}

void Mapper::check(const Takeable& takeable) {
  const std::vector<Ends> ends = ends_of(takeable);
  std::lock_guard<std::mutex> lock(mutex);
  const auto there = [&](std::size_t i) {
    return ends[i].open() && unchanged(takeable.parts[i], ends[i], takeable.as_of);
  };
  const Shared shared = shared_by(takeable, ends);
  bool whole = true;  // what leads to a buffer that has changed is no longer what it was
  for (std::size_t i = 0; i < ends.size(); ++i) whole = whole && (!ends[i].buffer || there(i));
  for (std::size_t i = 0; i < ends.size(); ++i) {
    if (!whole || !there(i) || sound(takeable.parts[i], ends[i], shared)) continue;
    throw InvariantBroken("pages that may be taken are not what they were, and nobody has changed them");
  }
}

}  // namespace ballonet
