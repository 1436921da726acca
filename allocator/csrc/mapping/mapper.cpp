#include "mapping/mapper.h"

#include <algorithm>
#include <utility>

namespace ballonet {

Mapper::Mapper(const Options& options) : space(options) {}

Mapper::~Mapper() { background.stop(); }

std::shared_ptr<Range> Mapper::reserve(std::size_t pieces, Owner owner, std::shared_ptr<Group> group, bool auto_retire,
                                       std::optional<std::size_t> expected, std::size_t more, bool keeps) {
  if (pieces == 0) throw UsageError("a range needs at least one page");
  std::shared_ptr<Range> range;  // destroyed, where something fails below, once the lock is released
  Section in(space);
  const bool from_cached = expected && owner == Owner::kKv;
  Stretch addresses;
  if (from_cached) {
    retirement.shelve_passed(in);
    addresses = cached.take(pieces, *expected);
  }
  if (addresses.pieces == 0) addresses = space.reserve(pieces);
  range = std::make_shared<Range>(shared_from_this(), std::move(addresses), pieces, owner, std::move(group),
                                  auto_retire, keeps);
  space.ranges.insert(range.get());
  if (owner == Owner::kKv) range->followers = more;
  if (from_cached) ahead.one_came(*range);
  return range;
}

void Mapper::forget(Range& range) {
  Section in(space);
  space.ranges.erase(&range);
  ahead.one_ended(range);
  space.free(range.addresses);
}

void Mapper::map(Range& range, std::size_t first, std::size_t count, Place place, bool wait) {
  Section in(space);
  mapping.map(in, range, first, count, place, wait);
  if (place == Place::kDevice && count > 0 && range.owner == Owner::kKv) ahead.tell_followers(range, first, count);
}

void Mapper::retire(Range& range, const Spans& spans) {
  Section in(space);
  for (const Span& span : spans) range.check_span(span.first, span.count);
  retirement.retire(range, spans);
  retirement.reap_later(in);
}

void Mapper::close(Range& range, bool unseen) {
  Section in(space);
  if (range.closed) return;
  retirement.retire(range, {{0, range.pieces}}, unseen);
  range.closed = true;
  ahead.one_ended(range);
  cached.keep_closed(range);
  retirement.reap_later(in);
}

std::size_t Mapper::reap(bool wait) {
  Section in(space);
  return wait ? retirement.reap_waiting(in) : retirement.reap(in);
}

void Mapper::catch_up() {
  Section in(space);
  while (ahead.serve_request(in) || ahead.serve_coming(in, *this)) {
  }
}

void Mapper::stop_background() {
  background.stop();
  Section in(space);
  cached.stop_keeping();
  ahead.expect_no_more();
  cached.empty_all();
  ahead.forget_requests();
}

// One step of the background thread: see Note [The background thread] in background.h.
Background::Next Mapper::work() {
  {
    const std::lock_guard lock(space.mutex);
    if (!ahead.wanted() && retirement.size() == 0 && !fences.streams.sync_wanted()) return Background::Next::kNothing;
  }
  Section in(space);
  if (fences.streams.capturing()) return Background::Next::kLater;
  if (fences.streams.sync_wanted()) {
    return fences.synchronize_streams(in) ? Background::Next::kMore : Background::Next::kLater;
  }
  if (ahead.serve_request(in) || ahead.serve_coming(in, *this)) return Background::Next::kMore;
  return retirement.step(in);
}

void Mapper::set_budget(std::size_t pages) {
  Section in(space);
  Pool& device = space.device;
  if (pages < device.book.created() && !fences.streams.capturing()) {
    retirement.reap(in);
    ahead.expect_no_more();
    cached.empty(device.book.created() - pages, CachedRanges::Take::kAll);
  }
  if (pages > device.budget()) ++raises_;
  device.set_budget(pages);
}

bool Mapper::within_budget() {
  Section in(space);
  Pool& device = space.device;
  if (device.book.created() > device.budget() && !fences.streams.capturing()) {
    retirement.reap(in);
    cached.empty(device.book.created() - device.budget(), CachedRanges::Take::kAll);
  }
  device.shrink();
  return !device.above_budget();
}

void Mapper::release_free() {
  Section in(space);
  ahead.expect_no_more();
  cached.empty_all();
  for (Pool* pool : {&space.device, &space.host, &space.peer}) pool->release_free();
}

std::pair<std::size_t, std::size_t> Mapper::free_memory() {
  DriverScope scope(space.driver, space.context.handle);
  std::size_t free = 0, total = 0;
  space.driver.cuMemGetInfo(&free, &total).or_throw("reading the device's free memory");
  return {free, total};
}

Mapper::Numbers Mapper::numbers() {
  const std::lock_guard lock(space.mutex);
  const Pool &device = space.device, &host = space.host, &peer = space.peer;
  return {device.budget(),
          device.book.created(),
          device.book.created_peak(),
          host.book.created(),
          host.budget(),
          host.book.count(Owner::kFree),
          space.ranges.size(),
          peer.book.created(),
          peer.budget(),
          peer.book.count(Owner::kFree),
          device.book.counts(),
          copies.copied(),
          device.book.kept() - space.table.ahead(),
          space.table.ahead(),
          space.driver.page_table_time(),
          host.book.count(Owner::kActivations)};
}

void Mapper::check() {
  const std::lock_guard lock(space.mutex);
  std::vector<const Stretch*> others = cached.stretches();
  others.push_back(&moves.scratch());
  space.check(others);
  cached.check();
  retirement.check();
  ahead.check();
}

// Ahead of a fork, which holds the lock: a child needs no page that its owner has given up, although it is still
// mapped.
void Mapper::tell_idle() {
  std::vector<const Stretch*> all = cached.stretches();
  for (const Range* range : space.ranges) all.push_back(&range->addresses);
  for (const Stretch* stretch : all) {
    for (std::size_t i = 0; i < stretch->size(); ++i) {
      const LeadsTo leads_to = (*stretch)[i].leads_to;
      if (leads_to == LeadsTo::kRetiring || leads_to == LeadsTo::kKept)
        space.driver.idle_at_fork(space.address(*stretch, i), space.page_size);
    }
  }
}

void Mapper::shutdown() {
  Section in(space);
  if (shut_) return;
  retirement.reap_waiting(in);
  if (retirement.size() > 0) retirement.reap_waiting(in);  // an unmap that failed once
  const auto open =
      std::count_if(space.ranges.begin(), space.ranges.end(), [](const Range* range) { return !range->closed; });
  if (open > 0) {
    throw UsageError(
        format("%zu ranges are still open: release the models and caches first", static_cast<std::size_t>(open)));
  }
  const bool cleared = moves.clear_scratch() || moves.clear_scratch();
  cached.empty_all();
  std::size_t left = 0;
  for (Pool* pool : {&space.device, &space.host, &space.peer}) left += pool->release_free();
  if (!cleared || retirement.size() > 0 || left > 0 || space.device.book.kept() > 0) {
    throw UsageError("the driver did not take back all pages; close the device again");
  }
  // What a tensor that is still alive gives back later goes to the driver.
  for (Pool* pool : {&space.device, &space.host, &space.peer}) pool->set_budget(0);
  cached.stop_keeping();
  shut_ = true;
}

}  // namespace ballonet
