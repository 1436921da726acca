#include "mapping/moves.h"

#include <utility>

namespace ballonet {

bool Aliasing::alias(Range& range, std::size_t first, Range& source, std::size_t source_first, std::size_t count) {
  std::unique_lock<std::mutex> lease;
  const bool changeable = range.may_change(lease);
  Section in(space_);
  Led led = lead(range, first, source, source_first, count);
  if (led.retiring) {
    retirement_.reap_waiting(in);
    led = lead(range, first, source, source_first, count);
  }
  if (!led.bare) {
    if (!changeable || !fences_.quiesce(in)) return false;
    led = lead(range, first, source, source_first, count);
  }
  if (led.retiring) throw UsageError("a piece is still about to lose another page");
  for (std::size_t i = first; i < first + count; ++i) {
    if (range.addresses[i].leads_to == LeadsTo::kKept) space_.vacate_kept(range.addresses, i);
  }
  exchange_pages(space_, {{range, first, std::move(led.targets)}});
  return true;
}

// Throws UsageError where they cannot.
Aliasing::Led Aliasing::lead(const Range& range, std::size_t first, const Range& source, std::size_t source_first,
                             std::size_t count) {
  range.check_span(first, count);
  source.check_span(source_first, count);
  Led led;
  for (std::size_t i = 0; i < count; ++i) {
    const Piece& shown = source.addresses[source_first + i];
    if (!has_own_page(shown.leads_to)) {
      throw UsageError(format("piece %zu of the other range has no page of its own", source_first + i));
    }
    led.targets.push_back({shown.page, LeadsTo::kAlias, shown.place});
    const Piece& piece = range.addresses[first + i];
    if (&range == &source && first == source_first)
      throw UsageError(format("piece %zu cannot lead to itself", first + i));
    if (piece.leads_to == LeadsTo::kRetiring) led.retiring = true;
    if (!leads_somewhere(piece.leads_to)) continue;
    led.bare = false;
    if (piece.doomed) throw UsageError(format("piece %zu is about to be retired", first + i));
    if (piece.leads_to != LeadsTo::kAlias && !shown_once(piece)) {
      throw UsageError(format("others lead to the page of piece %zu", first + i));
    }
  }
  return led;
}

bool Aliasing::own(Range& range, std::size_t first, std::size_t count) {
  std::unique_lock<std::mutex> lease;
  if (!range.may_change(lease)) return false;
  const auto check = [&] {
    range.check_span(first, count);
    for (std::size_t i = first; i < first + count; ++i) {
      if (range.addresses[i].leads_to != LeadsTo::kAlias || range.addresses[i].doomed) {
        throw UsageError(format("piece %zu does not lead to another range", i));
      }
    }
  };
  Section in(space_);
  check();
  if (!fences_.quiesce(in)) return false;
  if (space_.device.available() < count) retirement_.reap_waiting(in);
  check();
  std::vector<Target> targets;
  for (PageId page : mapping_.take(in, Place::kDevice, count, range.owner))
    targets.push_back({page, LeadsTo::kDevice, Place::kDevice});
  exchange_pages(space_, {{range, first, std::move(targets)}});
  return true;
}

bool Aliasing::adopt(Range& range, std::size_t first, Range& spare, std::size_t spare_first, std::size_t count) {
  std::unique_lock<std::mutex> lease;
  if (!range.may_change(lease)) return false;
  if (spare.group != range.group) throw UsageError("a range of another group");
  const auto check = [&] {
    range.check_span(first, count);
    spare.check_span(spare_first, count);
    for (std::size_t i = 0; i < count; ++i) {
      const Piece &piece = range.addresses[first + i], &page = spare.addresses[spare_first + i];
      if (piece.leads_to != LeadsTo::kAlias || piece.doomed) {
        throw UsageError(format("piece %zu does not lead to another range", first + i));
      }
      if (page.leads_to != LeadsTo::kDevice || page.doomed) {
        throw UsageError(format("piece %zu of the other range has no device page of its own", spare_first + i));
      }
      if (page.pins > 0 || !shown_once(page)) return false;
    }
    return true;
  };
  Section in(space_);
  if (!check() || !fences_.quiesce(in) || !check()) return false;
  retirement_.reap(in);
  std::vector<Target> pages;
  for (std::size_t i = 0; i < count; ++i) pages.push_back(spare.addresses[spare_first + i]);
  exchange_pages(space_, {{range, first, std::move(pages)}, {spare, spare_first, std::vector<Target>(count)}});
  return true;
}

bool Aliasing::take_over(Range& twin, std::size_t first, Range& spare, std::size_t spare_first, std::size_t count,
                         Range& range) {
  std::unique_lock<std::mutex> lease;
  if (!twin.may_change(lease)) return false;
  if (range.group != twin.group || spare.group != twin.group) throw UsageError("a range of another group");
  const auto check = [&] {
    twin.check_span(first, count);
    spare.check_span(spare_first, count);
    range.check_span(first, count);
  };
  Section in(space_);
  check();
  if (!fences_.quiesce(in)) return false;
  check();
  retirement_.reap(in);
  std::vector<Change> changes{{twin, first, {}, true}};
  for (std::size_t i = 0; i < count; ++i) {
    const Piece &old = twin.addresses[first + i], &fresh = spare.addresses[spare_first + i],
                &shown = range.addresses[first + i];
    if (!has_own_page(old.leads_to) || !has_own_page(fresh.leads_to) || old.doomed || fresh.doomed) {
      throw UsageError(format("piece %zu has no page of its own on both sides", first + i));
    }
    const bool leads = shown.leads_to == LeadsTo::kAlias && shown.page == old.page && shown.place == old.place;
    const unsigned mappings = space_.pool(old.place).book.mappings(old.page);
    if (mappings != (leads ? 2U : 1U) || !shown_once(fresh)) return false;
    changes.front().targets.push_back(fresh);
    if (leads) changes.push_back({range, first + i, {{fresh.page, LeadsTo::kAlias, fresh.place}}, true});
  }
  // The last of all: the bytes are behind an address throughout.
  changes.push_back({spare, spare_first, std::vector<Target>(count)});
  exchange_pages(space_, changes);
  return true;
}

Moves::Moves(AddressSpace& space, Fences& fences, Retirement& retirement, Mapping& mapping, Copies& copies)
    : space_(space),
      fences_(fences),
      retirement_(retirement),
      mapping_(mapping),
      copies_(copies),
      scratch_(space.context.scratch, 1) {}

bool Moves::clear_scratch() {
  if (scratch_[0].page == kNoPage) return true;
  // No fence covers it.
  if (!space_.driver.cuStreamSynchronize(space_.context.copy_stream).ok()) return false;
  return space_.vacate(scratch_, 0);
}

bool Moves::move(Range& range, std::size_t index, Place to) {
  std::unique_lock<std::mutex> lease;
  if (!range.may_change(lease)) return false;
  if (to == Place::kHost && !space_.context.host_pages) return false;
  const auto movable = [&] {
    range.check_span(index, 1);
    const Piece& piece = range.addresses[index];
    return has_own_page(piece.leads_to) && !piece.doomed && space_.pool(piece.place).book.mappings(piece.page) == 1;
  };
  const std::lock_guard<std::mutex> one_at_a_time(mutex_);
  Section in(space_);
  if (!movable()) return false;
  if (to == Place::kHost) space_.prepare(in, to, 1);
  // Copies are submitted without the lock: one that begins after the streams have passed may use the page.
  const std::uint64_t submitted = copies_.submitted();
  const auto copies_began = [&] { return copies_.submitting() || copies_.submitted() != submitted; };
  if (!fences_.quiesce(in) || copies_began()) return false;
  retirement_.reap(in);
  if (!movable()) return false;
  const Piece before = range.addresses[index];
  if (!clear_scratch() || space_.pool(to).available() == 0) return false;
  Target fresh{kNoPage, own_page_in(to), to};
  try {
    fresh.page = mapping_.take(in, to, 1, range.owner).front();
  } catch (const PoolExhausted&) {
    return false;
  }
  fill(in, space_.address(range.addresses, index), fresh);
  const Piece& now = range.addresses[index];
  if (range.closed || now.changed != before.changed || now.page != before.page || now.place != before.place ||
      now.doomed || copies_began()) {
    space_.discard(to, fresh.page);  // another thread has retired it meanwhile
    return false;
  }
  exchange_pages(space_, {{range, index, {fresh}, true}});
  copies_.count(range.owner, before.place, to, space_.page_size);
  return true;
}

// Copies what is behind an address to a page that is behind none, and waits for that without the lock. Throws
// DriverError; the page is given back, at the latest with the next move.
void Moves::fill(Section& in, CUdeviceptr from, const Target& fresh) {
  const CUstream stream = space_.context.copy_stream;
  try {
    space_.map(scratch_, 0, fresh);
    space_.open(scratch_, 0, 1);
    space_.driver.cuMemcpyAsync(scratch_.base, from, space_.page_size, stream).or_throw("copying a page");
    {
      Unlocked unlocked(in.lock);
      space_.driver.cuStreamSynchronize(stream).or_throw("waiting for the copy of a page");
    }
    if (clear_scratch()) return;
    throw DriverError("cuMemUnmap", cuda::kOperatingSystem, "a failure", "clearing the addresses of a page's copy");
  } catch (...) {
    space_.pool(fresh.place).book.relabel(fresh.page, Owner::kRetiring);
    if (clear_scratch()) space_.release(fresh.place, fresh.page);
    throw;
  }
}

}  // namespace ballonet
