// How the pages of a layer, say, are taken while it is in use, and nobody's pointer moves.
//
// Note [Taking]
// The addresses of what is taken lead to its twin afterwards: slower, and valid throughout. Its bytes are in the twin
// already ("clean"), or they come from where its sources say, or from its own pages; then everything is led there at
// once, and the pages are free. It happens while nothing that was submitted still runs and no other thread holds a
// lease, under the locks of the group and the mapper, on whatever thread needs pages. A failure in the middle leaves
// all as it was: the pages that the twin was given for it retire.
//
// Note [Void]
// Who publishes what may be taken describes pieces as they are at that moment: those of the home have pages of their
// own and hold what they should, those of the twin are backed and hold the same, or are not backed. Any change after it
// may make this wrong: a twin that was just mapped holds nothing yet. So each piece says when it last came to lead
// elsewhere, and what was admitted before that is void. A piece that was only moved to another page holds the same
// bytes, which is no change.
#include <algorithm>

#include "mapper.h"

namespace ballonet {

std::vector<Mapper::Ends> Mapper::ends_of(const Takeable& takeable) {
  std::vector<Ends> ends;
  for (const Takeable::Part& part : takeable.parts) ends.push_back({part.home.lock(), part.twin.lock()});
  return ends;
}

bool Mapper::admit(Takeable& takeable) {
  const std::vector<Ends> ends = ends_of(takeable);
  std::lock_guard<std::mutex> lock(mutex);
  for (std::size_t i = 0; i < ends.size(); ++i) {
    if (!ends[i].open()) return false;
    const Takeable::Part& part = takeable.parts[i];
    Range &home = *ends[i].home, &twin = *ends[i].twin;
    if (home.mapper.get() != this || twin.mapper.get() != this) throw UsageError("a range of another device");
    if (!home.group || home.group != takeable.group) throw UsageError("the range belongs to another group");
    check_span(home, part.first, part.count);
    check_span(twin, part.twin_first, part.count);
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
  bool later = false;
  for (std::size_t i = 0; i < ends.size(); ++i) {
    const Takeable::Part& part = takeable.parts[i];
    const bool fits = ends[i].open() && unchanged(part, ends[i], takeable.as_of) && sound(part, ends[i]);
    if (!fits || !sources_there(part, *ends[i].home)) return {Taken::Fate::kVoid, 0};
    for (std::size_t n = 0; n < part.count; ++n) {
      const Range::Piece& piece = ends[i].home->at(part.first + n);
      const Range::Piece& there = ends[i].twin->at(part.twin_first + n);
      if (piece.backing == Backing::kDevice) ++pages;
      if (!leads_somewhere(there.backing)) ++lacking;
      later |= there.backing == Backing::kDevice || pool_of(piece).mappings(piece.page) != 1;
    }
  }
  later |= pages == 0 || !context_.host_pages || host_.available() < lacking;
  return {later ? Taken::Fate::kLater : Taken::Fate::kTaken, pages, lacking};
}

bool Mapper::unchanged(const Takeable::Part& part, const Ends& ends, std::uint64_t as_of) {
  for (std::size_t i = 0; i < part.count; ++i) {
    if (ends.home->at(part.first + i).changed > as_of) return false;
    if (ends.twin->at(part.twin_first + i).changed > as_of) return false;
  }
  return true;
}

// Are these pages as Note [Void] wants them?
bool Mapper::sound(const Takeable::Part& part, const Ends& ends) {
  for (std::size_t i = 0; i < part.count; ++i) {
    const Range::Piece& piece = ends.home->at(part.first + i);
    const Range::Piece& there = ends.twin->at(part.twin_first + i);
    if (piece.backing != Backing::kDevice && piece.backing != Backing::kHost) return false;
    if (piece.doomed || there.doomed || there.backing == Backing::kAlias) return false;
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

Taken Mapper::take(Takeable& takeable) {
  const std::vector<Ends> ends = ends_of(takeable);
  Ranges done;
  std::lock_guard<std::mutex> lease(takeable.group->mutex);
  if (takeable.group->leased_by_others()) return {Taken::Fate::kLeased, 0};
  std::lock_guard<std::mutex> lock(mutex);
  const Taken found = examine(takeable, ends);
  if (found.fate != Taken::Fate::kTaken) return found;
  DriverScope scope(driver_, context_.handle);
  if (!quiesce()) return {Taken::Fate::kLater, 0};
  reap_locked(false, done);

  std::vector<Filling> fillings;
  std::vector<Change> changes;
  for (std::size_t i = 0; i < ends.size(); ++i) {
    Filling filling = filling_of(takeable.parts[i], ends[i]);
    for (std::size_t piece : filling.pieces) {
      if (filling.twin.at(piece).backing == Backing::kKept) let_go(filling.twin.held_, piece);
      if (filling.twin.at(piece).backing != Backing::kNone) return {Taken::Fate::kLater, 0};
    }
    if (!filling.pieces.empty()) fillings.push_back(std::move(filling));
    changes.push_back({*ends[i].home, takeable.parts[i].first, {}});
  }
  try {
    fill(fillings);
    for (std::size_t i = 0; i < ends.size(); ++i) {
      for (std::size_t n = 0; n < takeable.parts[i].count; ++n) {
        const Range::Piece& shown = ends[i].twin->at(takeable.parts[i].twin_first + n);
        changes[i].targets.push_back({shown.page, Backing::kAlias, shown.place});
      }
    }
    exchange(changes);
  } catch (...) {
    for (const Filling& filling : fillings) {
      Spans undone;
      for (std::size_t piece : filling.pieces) undone.push_back({piece, 1});
      retire_locked(filling.twin, undone);
    }
    takeable.as_of = changes_;  // all that changed has been undone
    reap_locked(false, done);
    throw;
  }
  return found;
}

Mapper::Filling Mapper::filling_of(const Takeable::Part& part, const Ends& ends) {
  Filling filling{*ends.home, *ends.twin, {}, {}};
  const CUdeviceptr from = address(*ends.home, part.first), to = address(*ends.twin, part.twin_first);
  const auto lacks = [&](std::size_t i) {
    return i < part.count && !leads_somewhere(ends.twin->at(part.twin_first + i).backing);
  };
  const auto place = [&](std::size_t i) { return ends.home->at(part.first + i).place; };
  for (std::size_t i = 0; i < part.count;) {
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

// Backs the pieces, copies into them and waits for that. After a failure some are backed, and no copy runs.
void Mapper::fill(const std::vector<Filling>& fillings) {
  for (const Filling& filling : fillings) {
    const PageId hint = page_after(filling.twin, filling.pieces.front(), Backing::kHost);
    back(filling.twin, filling.pieces, host_, host_.take(filling.pieces.size(), filling.twin.owner, hint),
         Backing::kHost);
  }
  try {
    for (const Filling& filling : fillings) {
      for (const Copy& copy : filling.copies) {
        driver_.cuMemcpyAsync(copy.to, copy.from, copy.size, context_.copy_stream).or_throw("filling a twin");
      }
    }
    if (!fillings.empty()) driver_.cuStreamSynchronize(context_.copy_stream).or_throw("waiting for a twin");
  } catch (...) {
    // No fence covers the copy stream. A driver that refuses again and again has lost its context, and all memory.
    for (int attempt = 0; attempt < 4 && !driver_.cuStreamSynchronize(context_.copy_stream).ok();) ++attempt;
    throw;
  }
  for (const Filling& filling : fillings) {
    const CUdeviceptr begin = address(filling.home, 0), end = address(filling.home, filling.home.pieces);
    for (const Copy& copy : filling.copies) {
      if (copy.from >= begin && copy.from < end) count_copy(filling.home.owner, Place::kHost, copy.size);
    }
  }
}

void Mapper::check(const Takeable& takeable) {
  const std::vector<Ends> ends = ends_of(takeable);
  std::lock_guard<std::mutex> lock(mutex);
  for (std::size_t i = 0; i < ends.size(); ++i) {
    if (!ends[i].open() || !unchanged(takeable.parts[i], ends[i], takeable.as_of)) continue;
    if (sound(takeable.parts[i], ends[i])) continue;
    throw InvariantBroken("pages that may be taken are not what they were, and nobody has changed them");
  }
}

}  // namespace ballonet
