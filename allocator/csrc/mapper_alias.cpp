// How pieces come to lead to the pages of another range, and to pages of their own again, under the tensors that lie
// there.
//
// Note [Aliases]
// A streamed layer has no pages of its own. Its addresses lead to a slot that it shares with others and that holds its
// weights while it runs, or, at rest, to its twin on the host. Which it is changes only when everything that was
// submitted has passed, and only while no other thread holds a lease on the layer. What the addresses then show is what
// the other range holds or, with pages of their own again, nothing in particular: the caller copies in what belongs
// there.
//
// Note [Readers without a lease]
// A thread that computes with a weight outside of any forward holds no lease. On the stand-in it reads what it should
// at any moment: both pages hold the same bytes, and the one takes the place of the other in one step (`Readable`). A
// driver has no such call: from the unmap to the access of the next page the address is bare, and what another thread
// submits just then fails. So such a thread takes a lease (`Managed.resident`).
#include <algorithm>
#include <exception>

#include "mapper.h"

namespace ballonet {

bool Mapper::alias(Range& range, std::size_t first, Range& source, std::size_t source_first, std::size_t count) {
  Ranges done;
  std::unique_lock<std::mutex> lease;
  const bool changeable = may_change(range, lease);
  DriverScope scope(driver_, context_.handle);
  Lock lock(mutex);
  Led led = lead(range, first, source, source_first, count);
  if (led.retiring) {
    reap_waiting(lock, done);
    led = lead(range, first, source, source_first, count);
  }
  if (!led.bare) {
    if (!changeable || !quiesce(lock)) return false;
    led = lead(range, first, source, source_first, count);
  }
  if (led.retiring) throw UsageError("a piece is still about to lose another page");
  for (std::size_t i = first; i < first + count; ++i) {
    if (range.at(i).backing == Backing::kKept) unkeep(range, i);
  }
  exchange({{range, first, led.targets}});
  return true;
}

// What pieces would lead to. Throws UsageError where they cannot.
Mapper::Led Mapper::lead(Range& range, std::size_t first, Range& source, std::size_t source_first, std::size_t count) {
  check_span(range, first, count);
  check_span(source, source_first, count);
  Led led;
  for (std::size_t i = 0; i < count; ++i) {
    const Range::Piece& shown = source.at(source_first + i);
    if (!has_own_page(shown.backing)) {
      throw UsageError(format("piece %zu of the other range has no page of its own", source_first + i));
    }
    led.targets.push_back({shown.page, Backing::kAlias, shown.place});
    const Range::Piece& piece = range.at(first + i);
    if (&piece == &source.at(source_first + i)) throw UsageError(format("piece %zu cannot lead to itself", first + i));
    if (piece.backing == Backing::kRetiring) led.retiring = true;
    if (!leads_somewhere(piece.backing)) continue;
    led.bare = false;
    if (piece.doomed) throw UsageError(format("piece %zu is about to be retired", first + i));
    if (piece.backing != Backing::kAlias && pool_of(piece).mappings(piece.page) != 1) {
      throw UsageError(format("others lead to the page of piece %zu", first + i));
    }
  }
  return led;
}

bool Mapper::own(Range& range, std::size_t first, std::size_t count) {
  Ranges done;
  std::unique_lock<std::mutex> lease;
  if (!may_change(range, lease)) return false;
  const auto check = [&] {
    check_span(range, first, count);
    for (std::size_t i = first; i < first + count; ++i) {
      if (range.at(i).backing != Backing::kAlias || range.at(i).doomed) {
        throw UsageError(format("piece %zu does not lead to another range", i));
      }
    }
  };
  DriverScope scope(driver_, context_.handle);
  Lock lock(mutex);
  check();
  if (!quiesce(lock)) return false;
  if (device_.available() < count) reap_waiting(lock, done);
  check();
  std::vector<Target> targets;
  for (PageId page : take_pages(device_, count, range.owner, kNoPage, done))
    targets.push_back({page, Backing::kDevice, Place::kDevice});
  exchange({{range, first, targets}});
  return true;
}

bool Mapper::adopt(Range& range, std::size_t first, Range& spare, std::size_t spare_first, std::size_t count) {
  Ranges done;
  std::unique_lock<std::mutex> lease;
  if (!may_change(range, lease)) return false;
  if (spare.group != range.group) throw UsageError("a range of another group");
  const auto check = [&] {
    check_span(range, first, count);
    check_span(spare, spare_first, count);
    for (std::size_t i = 0; i < count; ++i) {
      const Range::Piece &piece = range.at(first + i), &page = spare.at(spare_first + i);
      if (piece.backing != Backing::kAlias || piece.doomed) {
        throw UsageError(format("piece %zu does not lead to another range", first + i));
      }
      if (page.backing != Backing::kDevice || page.doomed) {
        throw UsageError(format("piece %zu of the other range has no device page of its own", spare_first + i));
      }
      if (page.pins > 0 || device_.mappings(page.page) != 1) return false;
    }
    return true;
  };
  DriverScope scope(driver_, context_.handle);
  Lock lock(mutex);
  if (!check() || !quiesce(lock) || !check()) return false;
  reap_locked(done);
  std::vector<Target> pages;
  for (std::size_t i = 0; i < count; ++i) {
    pages.push_back({spare.at(spare_first + i).page, Backing::kDevice, Place::kDevice});
  }
  const std::vector<Target> nothing(count, Target{kNoPage, Backing::kNone, Place::kDevice});
  exchange({{range, first, pages}, {spare, spare_first, nothing}});
  return true;
}

bool Mapper::take_over(Range& twin, std::size_t first, Range& spare, std::size_t spare_first, std::size_t count,
                       Range& home) {
  Ranges done;
  std::unique_lock<std::mutex> lease;
  if (!may_change(twin, lease)) return false;
  if (home.group != twin.group || spare.group != twin.group) throw UsageError("a range of another group");
  const auto check = [&] {
    check_span(twin, first, count);
    check_span(spare, spare_first, count);
    check_span(home, first, count);
  };
  DriverScope scope(driver_, context_.handle);
  Lock lock(mutex);
  check();
  if (!quiesce(lock)) return false;
  check();
  reap_locked(done);
  std::vector<Target> bytes, nothing(count, Target{kNoPage, Backing::kNone, Place::kDevice});
  std::vector<Change> shows;
  std::vector<std::pair<Range::Piece*, std::uint64_t>> unchanged;
  for (std::size_t i = 0; i < count; ++i) {
    Range::Piece &old = twin.at(first + i), &fresh = spare.at(spare_first + i), &shown = home.at(first + i);
    if (!has_own_page(old.backing) || !has_own_page(fresh.backing) || old.doomed || fresh.doomed) {
      throw UsageError(format("piece %zu has no page of its own on both sides", first + i));
    }
    const bool leads = shown.backing == Backing::kAlias && shown.page == old.page && shown.place == old.place;
    if (pool_of(old).mappings(old.page) != (leads ? 2U : 1U) || pool_of(fresh).mappings(fresh.page) != 1) return false;
    bytes.push_back({fresh.page, fresh.backing, fresh.place});
    unchanged.push_back({&old, old.changed});
    if (!leads) continue;
    shows.push_back({home, first + i, {{fresh.page, Backing::kAlias, fresh.place}}});
    unchanged.push_back({&shown, shown.changed});
  }
  std::vector<Change> changes{{twin, first, std::move(bytes)}};
  for (Change& change : shows) changes.push_back(std::move(change));
  changes.push_back({spare, spare_first, std::move(nothing)});  // last: the bytes are behind an address throughout
  exchange(changes);
  for (const auto& [piece, before] : unchanged) piece->changed = before;
  return true;
}

// Takes the range's lease. False where another thread holds one.
bool Mapper::may_change(Range& range, std::unique_lock<std::mutex>& lease) {
  if (!range.group) return true;
  lease = std::unique_lock<std::mutex>(range.group->mutex);
  return !range.group->leased_by_others();
}

// Waits for everything that was submitted, without the lock: see Note [Waiting]. False, and nothing waited for, while a
// stream is being captured.
bool Mapper::quiesce(Lock& lock) {
  if (streams_.capturing()) return false;
  Fence fence = streams_.fence(streams_.seen());
  try {
    await(lock, streams_.awaited(fence));
  } catch (...) {
    streams_.recycle(fence);
    throw;
  }
  streams_.recycle(fence);
  return true;
}

// Puts other pages behind pieces, all or none. Pages of a range's own that are behind no piece of it afterwards, be
// they old or new, are free.
void Mapper::exchange(const std::vector<Change>& changes) {
  struct Step {
    Range& range;
    std::size_t index;
    Target before, after;
  };
  std::vector<Step> steps;
  for (const Change& change : changes) {
    for (std::size_t i = 0; i < change.targets.size(); ++i) {
      const Range::Piece& piece = change.range.at(change.first + i);
      steps.push_back({change.range, change.first + i, {piece.page, piece.backing, piece.place}, change.targets[i]});
    }
  }
  Readable readable(driver_, page_size);
  for (const Step& step : steps) {
    if (step.after.page != kNoPage) readable.add(address(step.range, step.index));
  }
  std::size_t reached = 0;
  std::exception_ptr failed;
  try {
    for (; reached < steps.size(); ++reached) show(steps[reached].range, steps[reached].index, steps[reached].after);
    for (const auto& [range, first, targets] : changes) {
      for (std::size_t from = 0, to = 0; from < targets.size(); from = to) {
        const auto alike = [&](const Target& target) {
          return target.place == targets[from].place && (target.page == kNoPage) == (targets[from].page == kNoPage);
        };
        while (to < targets.size() && alike(targets[to])) ++to;
        if (targets[from].page != kNoPage) allow_access(address(range, first + from), to - from, targets[from].place);
      }
    }
    for (const Step& step : steps) step.range.at(step.index).open = step.after.page != kNoPage;
  } catch (...) {
    failed = std::current_exception();
    for (std::size_t i = 0; i < std::min(reached + 1, steps.size()); ++i) {
      show_again(steps[i].range, steps[i].index, steps[i].before);
    }
  }
  std::set<std::pair<Place, PageId>> owned;
  for (const Step& step : steps) {
    const Range::Piece& piece = step.range.at(step.index);
    if (has_own_page(piece.backing)) owned.insert({piece.place, piece.page});
  }
  for (const Step& step : steps) {
    for (const Target& side : {step.before, step.after}) {
      if (side.page == kNoPage || owned.count({side.place, side.page}) > 0) continue;
      Pool& pool = pool_of(side.place);
      if (side.backing != Backing::kAlias) pool.relabel(side.page, Owner::kRetiring);
      release_page(pool, side.page);  // an alias's, where its own range was closed meanwhile
    }
  }
  if (failed) std::rethrow_exception(failed);
}

// Maps a page at the piece, instead of the one that is there; or none. Post, also of a failure: the piece says what is
// mapped.
void Mapper::show(Range& range, std::size_t index, const Target& target) {
  Range::Piece& piece = range.at(index);
  piece.changed = ++changes_;
  if (piece.page != kNoPage) {
    driver_.cuMemUnmap(address(range, index), page_size).or_throw("taking a page from its address");
    --pool_of(piece).mappings(piece.page);
    piece.page = kNoPage;
    piece.backing = Backing::kNone;
    piece.open = false;
  }
  if (target.page == kNoPage) return;
  map_page(address(range, index), pool_of(target.place), target.page);
  piece.page = target.page;
  piece.backing = target.backing;
  piece.place = target.place;
}

// After a failure: what was there, with access. A driver that refuses again and again leaves a piece without access,
// which the next `map` gives, or without a page.
void Mapper::show_again(Range& range, std::size_t index, const Target& target) {
  Range::Piece& piece = range.at(index);
  for (int attempt = 0; attempt < 4; ++attempt) {
    try {
      if (piece.page != target.page || piece.place != target.place) show(range, index, target);
      if (piece.page != kNoPage && !piece.open) allow_access(address(range, index), 1, piece.place);
      piece.open = piece.page != kNoPage;
      return;
    } catch (const DriverError&) {
      continue;
    }
  }
}

}  // namespace ballonet
