#include "mapping/mapper.h"

#include <algorithm>
#include <utility>

#include "base/tuning.h"
#include "mapping/range.h"

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

std::size_t Ahead::limit() const { return std::max<std::size_t>(1, tuning::kAheadBytes / space_.page_size); }

void Ahead::ask(const std::shared_ptr<Range>& range, std::size_t first, std::size_t count) {
  if (first > range->pieces || count > range->pieces - first) {
    throw UsageError(format("pieces %zu to %zu lie outside a range of %zu", first, first + count, range->pieces));
  }
  if (range->owner != Owner::kKv && range->owner != Owner::kWeights)
    throw UsageError("only ranges of KV and of weights are mapped ahead");
  if (count > 0 && background_.running() && push({range, first, first + count})) background_.notify();
}

bool Ahead::push(Request request) {
  const std::lock_guard lock(mutex_);
  if (requests_.size() == tuning::kAheadRequests) return false;
  requests_.push_back(std::move(request));
  return true;
}

void Ahead::tell_followers(Range& range, std::size_t first, std::size_t count) {
  if (!background_.running()) return;
  if (const std::size_t more = std::exchange(range.followers, 0)) {
    expect_no_more();
    coming_ = Coming{&range, &range, more, first + count};
  }
  if (!range.next.expired()) {
    push({range.next, first, first + count});
  } else if (!coming_) {
    return;  // no range follows, and no claim has made room for others
  }
  background_.notify();
}

void Ahead::one_came(Range& range) {
  if (!coming_ || coming_->like->pieces != range.pieces || coming_->like->group != range.group) return;
  coming_->last->next = range.weak_from_this();
  coming_->last = &range;
  if (--coming_->left == 0) return expect_no_more();
  background_.notify();
}

void Ahead::one_ended(const Range& range) {
  if (coming_ && (coming_->like == &range || coming_->last == &range)) expect_no_more();
}

void Ahead::expect_no_more() {
  if (!coming_) return;
  coming_.reset();
  cached_.unpromise();
}

void Ahead::forget_requests() {
  const std::lock_guard lock(mutex_);
  requests_.clear();
}

bool Ahead::wanted() const {
  const std::lock_guard lock(mutex_);
  return !requests_.empty() || coming_;
}

bool Ahead::serve_request(Section& in) {
  Request* oldest;
  {
    const std::lock_guard lock(mutex_);
    if (requests_.empty()) return false;
    oldest = &requests_.front();  // stays: others only add to the end, and only holders of the mapper's lock remove
  }
  if (const std::shared_ptr<Range> range = oldest->range.lock()) {
    in.ended.push_back(range);
    const auto backed = [&] { return range->addresses[oldest->next].leads_to != LeadsTo::kNone; };
    while (!range->closed && oldest->next < oldest->end && backed()) ++oldest->next;
    const bool wanted = !range->closed && oldest->next < oldest->end;
    if (wanted && map_one(*range, oldest->next, CachedRanges::Take::kNotAhead)) return true;
  }
  const std::lock_guard lock(mutex_);
  requests_.pop_front();
  return true;
}

bool Ahead::serve_coming(Section& in, Mapper& mapper) {
  if (!coming_ || space_.table.ahead() >= limit() || fences_.streams.capturing()) return false;
  const bool enough = cached_.promise(coming_->like->pieces, coming_->left) == coming_->left;
  if (enough && !cached_.lacks(coming_->mapped)) return false;
  cached_.empty(1, CachedRanges::Take::kUnpromised);
  if (space_.device.book.idle() + space_.device.creatable() == 0) return false;
  Stretch addresses = cached_.take_lacking(coming_->mapped);
  if (addresses.pieces == 0) {
    try {
      addresses = space_.reserve(coming_->like->pieces);
    } catch (const DriverError&) {
      expect_no_more();
      return false;
    }
  }
  // As a range that is closed it becomes a cached range again, whatever fails meanwhile.
  const std::size_t pieces = addresses.pieces;
  const auto range =
      std::make_shared<Range>(mapper.shared_from_this(), std::move(addresses), pieces, Owner::kKv, nullptr, false);
  in.ended.push_back(range);
  range->closed = true;
  std::size_t piece = 0;
  while (range->addresses[piece].leads_to != LeadsTo::kNone) ++piece;
  const bool mapped = map_one(*range, piece, CachedRanges::Take::kUnpromised);
  cached_.keep_closed(*range);
  if (range->addresses.pieces > 0) {  // a page that could not be opened is retiring there
    for (std::size_t i = 0; range->addresses.ahead() > 0; ++i) space_.table.forget_ahead(range->addresses, i);
    space_.ranges.insert(range.get());
  }
  if (!mapped) expect_no_more();
  return mapped;
}

// Pre: the piece is unbacked. False where no more can be mapped ahead.
bool Ahead::map_one(Range& range, std::size_t piece, CachedRanges::Take take) {
  if (space_.table.ahead() >= limit() || fences_.streams.capturing()) return false;
  cached_.empty(1, take);
  try {
    const PageId hint = mapping_.hint_for(range, piece, Place::kDevice);
    mapping_.back(range, {piece}, Place::kDevice, space_.device.take(1, range.owner, hint));
  } catch (const std::runtime_error&) {
    return false;
  }
  space_.keep(range.addresses, piece, true);
  return true;
}

void Ahead::check() const {
  if (space_.table.ahead() > limit()) throw InvariantBroken("more pages are mapped ahead than there may be");
}

Range::Range(std::shared_ptr<Mapper> mapper_, Stretch addresses_, std::size_t pieces_, Owner owner_,
             std::shared_ptr<Group> group_, bool auto_retire_, bool keeps_)
    : base(addresses_.base),
      pieces(pieces_),
      owner(owner_),
      group(std::move(group_)),
      auto_retire(auto_retire_),
      keeps(keeps_),
      mapper(std::move(mapper_)),
      addresses(std::move(addresses_)) {}

// Pre: nothing is mapped: `close` retired everything, and retirements and pins keep the range alive.
Range::~Range() { mapper->forget(*this); }

void Range::check_span(std::size_t first, std::size_t count) const {
  if (closed) throw UsageError("the range is closed");
  if (first > pieces || count > pieces - first) {
    throw UsageError(format("pieces %zu to %zu lie outside a range of %zu", first, first + count, pieces));
  }
}

bool Range::may_change(std::unique_lock<std::mutex>& lease) const {
  if (!group) return true;
  lease = std::unique_lock<std::mutex>(group->mutex);
  return !group->leased_by_others();
}

LeadsTo Range::leads_to(std::size_t piece) {
  const std::lock_guard lock(mapper->space.mutex);
  return addresses[piece].leads_to;
}

PageId Range::page(std::size_t piece) {
  const std::lock_guard lock(mapper->space.mutex);
  return addresses[piece].page;
}

std::optional<Place> Range::place(std::size_t piece) {
  const std::lock_guard lock(mapper->space.mutex);
  if (addresses[piece].page == kNoPage) return {};
  return addresses[piece].place;
}

std::size_t Range::backed() {
  const std::lock_guard lock(mapper->space.mutex);
  return addresses.backed();
}

std::vector<std::tuple<std::size_t, std::size_t, LeadsTo>> Range::runs(std::size_t first, std::size_t count) {
  std::vector<std::tuple<std::size_t, std::size_t, LeadsTo>> found;
  const std::lock_guard lock(mapper->space.mutex);
  for (std::size_t piece = first; piece < first + count; ++piece) {
    const LeadsTo leads_to = addresses[piece].leads_to;
    if (found.empty() || std::get<2>(found.back()) != leads_to) found.emplace_back(piece, 0, leads_to);
    ++std::get<1>(found.back());
  }
  return found;
}

void Range::pin(std::size_t offset, std::size_t size) {
  AddressSpace& space = mapper->space;
  const std::lock_guard lock(space.mutex);
  if (size == 0) return;
  const std::size_t extent = pieces * space.page_size;
  if (offset > extent || size > extent - offset) {
    throw UsageError(format("%zu bytes at %zu lie outside a range of %zu bytes", size, offset, extent));
  }
  const std::size_t first = offset / space.page_size, last = (offset + size - 1) / space.page_size;
  check_span(first, last - first + 1);
  for (std::size_t i = first; i <= last; ++i) {
    if (!leads_somewhere(addresses[i].leads_to) || addresses[i].doomed) {
      throw UsageError(
          format("bytes %zu to %zu of the range are not all backed: map piece %zu first", offset, offset + size, i));
    }
    if (addresses[i].pins == 0xffff) throw UsageError("more than 65535 tensors lie over one page");
  }
  for (std::size_t i = first; i <= last; ++i) space.table.pin(addresses, i);
}

void Range::open_window() {
  const std::lock_guard lock(mapper->space.mutex);
  ++windows;
}

void Range::close_window() {
  const std::lock_guard lock(mapper->space.mutex);
  --windows;
  mapper->cached.keep_closed(*this);
}

void Range::unpin(std::size_t offset, std::size_t size) {
  AddressSpace& space = mapper->space;
  std::unique_lock lock(space.mutex);
  if (size == 0) return;
  if (group) ++group->unpinned;
  const std::size_t first = offset / space.page_size, last = (offset + size - 1) / space.page_size;
  Spans unused;
  for (std::size_t i = first; i <= last; ++i) {
    if (space.table.unpin(addresses, i) && (addresses[i].doomed || auto_retire)) unused.push_back({i, 1});
  }
  if (unused.empty()) return;
  Section in(space, std::move(lock));
  mapper->retirement.retire(*this, unused);
  mapper->retirement.reap_later(in);
}

}  // namespace ballonet
