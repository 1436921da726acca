#include "mapper.h"

#include <algorithm>
#include <utility>

namespace ballonet {
Mapper::Mapper(const Options& options)
    : page_size(options.page_size),
      ordinal(options.ordinal),
      driver_(options.library),
      context_(driver_, options.ordinal, options.page_size, options.standin, options.peer, options.host_pages),
      device_(driver_, context_.device_place, options.page_size, options.budget, &journal),
      host_(driver_, context_.host_place, options.page_size, options.host_budget, nullptr),
      peer_(driver_, context_.peer_place, options.page_size, context_.peer_pages ? options.peer_budget : 0, nullptr),
      streams_(driver_) {
  watch_forks(options.library);
  streams_.note(context_.copy_stream);  // a page that is copied does not leave before
}

Mapper::~Mapper() {
  DriverScope scope(driver_, context_.handle);
  for (Pool* pool : {&device_, &host_, &peer_}) pool->release_free();
  for (CUstream stream : {to_device_, from_device_}) {
    if (stream != nullptr) driver_.cuStreamDestroy(stream);
  }
  streams_.close();
}

Range::Range(std::shared_ptr<Mapper> mapper_, Stretch held, std::size_t pieces_, Owner owner_,
             std::shared_ptr<Group> group_, bool auto_retire_)
    : base(held.base),
      pieces(pieces_),
      owner(owner_),
      group(std::move(group_)),
      auto_retire(auto_retire_),
      mapper(std::move(mapper_)),
      held_(std::move(held)) {}

// Pre: nothing is mapped: `close` retired everything, and retirements and pins keep the range alive.
Range::~Range() { mapper->forget(*this); }

Range::Piece& Range::at(std::size_t piece) {
  if (piece >= held_.table.size()) held_.table.resize(piece + 1);
  return held_.table[piece];
}

std::shared_ptr<Range> Mapper::reserve(std::size_t pieces, Owner owner, std::shared_ptr<Group> group, bool auto_retire,
                                       std::optional<std::size_t> expected, std::size_t more) {
  if (pieces == 0) throw UsageError("a range needs at least one page");
  std::shared_ptr<Range> range;  // destroyed, where something fails below, once the lock is released
  Ranges done;
  std::lock_guard<std::mutex> lock(mutex);
  DriverScope scope(driver_, context_.handle);
  Stretch held;
  if (expected && owner == Owner::kKv) {
    shelve_passed(done);
    held = slot_for(pieces, *expected);
  }
  if (held.pieces == 0) held = reserved(pieces);
  range = std::make_shared<Range>(shared_from_this(), std::move(held), pieces, owner, std::move(group), auto_retire);
  ranges_.insert(range.get());
  if (owner == Owner::kKv) range->more_ = more;
  if (expected && owner == Owner::kKv) one_came(*range);
  return range;
}

Stretch Mapper::reserved(std::size_t pieces) {
  Stretch made;
  // Pages begin at multiples of their size where that is an alignment and the driver gives it.
  const std::size_t alignment = (page_size & (page_size - 1)) == 0 ? page_size : 0;
  const std::size_t size = pieces * page_size;
  auto reserved = driver_.cuMemAddressReserve(&made.base, size, alignment, CUdeviceptr{0}, 0ULL);
  const bool refused = reserved.code() == cuda::kInvalidValue || reserved.code() == cuda::kNotSupported;
  if (refused) reserved = driver_.cuMemAddressReserve(&made.base, size, std::size_t{0}, CUdeviceptr{0}, 0ULL);
  reserved.or_throw(format("reserving %s of addresses", in_units(size).c_str()));
  made.pieces = pieces;
  return made;
}

void Mapper::forget(Range& range) {
  std::lock_guard<std::mutex> lock(mutex);
  DriverScope scope(driver_, context_.handle);
  ranges_.erase(&range);
  if (coming_ && (coming_->like == &range || coming_->last == &range)) expect_no_more();
  free_addresses(range.held_);
}

// Pre: nothing is mapped there.
void Mapper::free_addresses(Stretch& stretch) {
  const std::size_t size = stretch.pieces * page_size;
  if (size == 0) return;
  // Addresses that the driver does not take back are lost as addresses only; no memory is behind them.
  if (!driver_.cuMemAddressFree(stretch.base, size).ok()) driver_.cuMemAddressFree(stretch.base, size);
  stretch = {};
}

// Once a range is closed and nothing waits for its addresses any more they are a slot, if pages are kept there.
void Mapper::settle(Range& range) {
  const auto unused = [](const Range::Piece& piece) {
    return piece.backing == Backing::kNone || piece.backing == Backing::kKept;
  };
  if (!range.closed_ || !std::all_of(range.held_.table.begin(), range.held_.table.end(), unused)) return;
  if (range.held_.kept == 0) return free_addresses(range.held_);
  slots_.push_back(std::exchange(range.held_, {}));
}

void Mapper::check_span(const Range& range, std::size_t first, std::size_t count) const {
  if (range.closed_) throw UsageError("the range is closed");
  if (first > range.pieces || count > range.pieces - first) {
    throw UsageError(format("pieces %zu to %zu lie outside a range of %zu", first, first + count, range.pieces));
  }
}

void Mapper::map_page(CUdeviceptr at, Pool& pool, PageId page) {
  driver_.cuMemMap(at, page_size, std::size_t{0}, pool.handle(page), 0ULL).or_throw(format("mapping page %u", page));
  ++pool.mappings(page);
}

void Mapper::allow_access(CUdeviceptr at, std::size_t pages, Place place) {
  context_.open_page(at, pages * page_size, place == Place::kHost);
}

// Puts pages behind unbacked pieces, in order. All or none: on a failure what was mapped is unmapped again, and the
// pieces that could not be are left to the queue of retirements.
void Mapper::back(Range& range, const std::vector<std::size_t>& pieces, Pool& pool, const std::vector<PageId>& pages,
                  Backing backing) {
  std::size_t mapped = 0;
  try {
    for (; mapped < pieces.size(); ++mapped) {
      map_page(address(range, pieces[mapped]), pool, pages[mapped]);
      Range::Piece& piece = range.at(pieces[mapped]);
      piece.page = pages[mapped];
      piece.backing = backing;
      piece.place = place_of(pool);
      piece.changed = ++changes_;
    }
    for (std::size_t from = 0, to = 0; from < pieces.size(); from = to) {
      to = from + 1;
      while (to < pieces.size() && pieces[to] == pieces[to - 1] + 1) ++to;
      allow_access(address(range, pieces[from]), to - from, place_of(pool));
      for (std::size_t i = from; i < to; ++i) range.at(pieces[i]).open = true;
    }
  } catch (...) {
    Spans undone;
    for (std::size_t i = 0; i < mapped; ++i) undone.push_back({pieces[i], 1});
    retire_locked(range, undone);
    if (backing != Backing::kAlias) {
      for (std::size_t i = mapped; i < pages.size(); ++i) pool.give(pages[i]);
    }
    throw;
  }
}

// The page that should be behind a piece, so that neighbours in address are neighbours in the pool.
PageId Mapper::page_after(Range& range, std::size_t piece, Backing backing) {
  if (piece == 0) return kNoPage;
  const Range::Piece& before = range.at(piece - 1);
  const bool same = before.backing == backing || (before.backing == Backing::kKept && backing == Backing::kDevice);
  return same ? before.page + 1 : kNoPage;
}

// Idle pages first, then those that retirements and slots have, then new ones, and last what was mapped ahead.
std::vector<PageId> Mapper::take_pages(Pool& pool, std::size_t n, Owner owner, PageId hint, Ranges& done) {
  if (pool.idle() < n) reap_locked(done);
  if (&pool != &device_ || pool.kept() == 0) return pool.take(n, owner, hint);
  empty_slots(n, Take::kNotAhead);
  if (pool.idle() + pool.creatable() < n) empty_slots(n - pool.creatable(), Take::kAll);
  try {
    return pool.take(n, owner, hint);
  } catch (const PoolExhausted&) {
    if (pool.kept() == 0) throw;
    empty_slots(n, Take::kAll);  // the driver has less than the budget allows
  }
  return pool.take(n, owner, hint);
}

void Mapper::prepare_host(std::size_t pages) {
  if (!context_.host_pages) return;
  DriverScope scope(driver_, context_.handle);
  Lock lock(mutex);
  prepare(lock, host_, pages);
}

// Has so many pages idle, or as many as can be had, without the lock while the driver creates them. Throws nothing of
// the driver's: whoever needs them asks again.
void Mapper::prepare(Lock& lock, Pool& pool, std::size_t pages) {
  if (pool.idle() >= pages || pool.available() < pages) return;
  Pool::Creation creation = pool.begin_creating(pages - pool.idle());
  {
    Unlocked unlocked(lock);
    pool.create(creation);
  }
  pool.end_creating(creation);
}

void Mapper::map(Range& range, std::size_t first, std::size_t count, Place place, bool wait) {
  Ranges done;
  DriverScope scope(driver_, context_.handle);
  Lock lock(mutex);
  check_span(range, first, count);
  if (place == Place::kHost && !context_.host_pages) {
    throw UsageError("there are no host pages: " + context_.host_refused);
  }
  if (place == Place::kPeer && !context_.peer_pages) throw UsageError("there is no peer");
  const Backing wanted = backing_of(place);
  Pool& pool = pool_of(place);
  Pieces found;
  bool waited = !wait, prepared = false;
  for (;;) {
    found = pieces_to_back(range, first, count, wanted);
    const bool lacking = pool.available() < found.unbacked.size() && !streams_.capturing();
    if (!waited && (found.elsewhere || lacking)) {
      reap_waiting(lock, done);
      waited = true;
    } else if (place == Place::kHost && !prepared && pool.idle() < found.unbacked.size()) {
      prepare(lock, pool, found.unbacked.size());
      prepared = true;
    } else {
      break;
    }
    check_span(range, first, count);
  }
  if (found.elsewhere) throw UsageError(format("a piece from %zu on is still about to lose another page", first));

  for (std::size_t i : found.adopted) {
    Range::Piece& piece = range.at(i);
    piece.backing = wanted;
    piece.ticket = 0;
    piece.changed = ++changes_;
    pool.relabel(piece.page, range.owner);
  }
  for (std::size_t i : found.claimed) claim(range, i);
  try {
    for (std::size_t i = first; i < first + count; ++i) {  // what failed half way may have left pages without access
      Range::Piece& piece = range.at(i);
      if (piece.backing == wanted && !piece.open) allow_access(address(range, i), 1, place);
      piece.open = piece.backing == wanted;
    }
    if (!found.unbacked.empty()) {
      const PageId hint = page_after(range, found.unbacked.front(), wanted);
      back(range, found.unbacked, pool, take_pages(pool, found.unbacked.size(), range.owner, hint, done), wanted);
    }
  } catch (...) {
    Spans adopted;
    for (std::size_t i : found.adopted) adopted.push_back({i, 1});
    retire_locked(range, adopted);
    for (std::size_t i : found.claimed) keep(range, i, false);
    throw;
  }
  for (std::size_t i = first; i < first + count; ++i) range.at(i).doomed = false;
  if (place == Place::kDevice && count > 0 && range.owner == Owner::kKv) tell_followers(range, first, count);
}

// What has to be done to back these pieces so. Throws UsageError where one has another backing, DriverError.
Mapper::Pieces Mapper::pieces_to_back(Range& range, std::size_t first, std::size_t count, Backing wanted) {
  Pieces found;
  for (std::size_t i = first; i < first + count; ++i) {
    if (range.at(i).backing == Backing::kKept && wanted != Backing::kDevice) unkeep(range, i);
    const Range::Piece& piece = range.at(i);
    if (piece.backing == Backing::kNone) {
      found.unbacked.push_back(i);
    } else if (piece.backing == Backing::kRetiring) {
      if (piece.retiring_from == wanted) found.adopted.push_back(i);
      found.elsewhere |= piece.retiring_from != wanted;
    } else if (piece.backing == Backing::kKept) {
      found.claimed.push_back(i);
    } else if (piece.backing != wanted) {
      throw UsageError(format("piece %zu already has another backing", i));
    }
  }
  return found;
}

void Mapper::close(Range& range, bool unseen) {
  Ranges done;
  std::lock_guard<std::mutex> lock(mutex);
  if (range.closed_) return;
  DriverScope scope(driver_, context_.handle);
  retire_locked(range, {{0, range.pieces}}, unseen);
  range.closed_ = true;
  if (coming_ && (coming_->like == &range || coming_->last == &range)) expect_no_more();
  settle(range);
  reap_later(done);
}

void Mapper::pin(Range& range, std::size_t offset, std::size_t size) {
  std::lock_guard<std::mutex> lock(mutex);
  if (size == 0) return;
  const std::size_t extent = range.pieces * page_size;
  if (offset > extent || size > extent - offset) {
    throw UsageError(format("%zu bytes at %zu lie outside a range of %zu bytes", size, offset, extent));
  }
  const std::size_t first = offset / page_size, last = (offset + size - 1) / page_size;
  check_span(range, first, last - first + 1);
  for (std::size_t i = first; i <= last; ++i) {
    const Range::Piece& piece = range.at(i);
    if (!leads_somewhere(piece.backing) || piece.doomed) {
      throw UsageError(
          format("bytes %zu to %zu of the range are not all backed: map piece %zu first", offset, offset + size, i));
    }
    if (piece.pins == 0xffff) throw UsageError("more than 65535 tensors lie over one page");
  }
  for (std::size_t i = first; i <= last; ++i) ++range.at(i).pins;
}

void Mapper::unpin(Range& range, std::size_t offset, std::size_t size) {
  Ranges done;
  std::lock_guard<std::mutex> lock(mutex);
  if (size == 0) return;
  if (range.group) ++range.group->unpinned;
  const std::size_t first = offset / page_size, last = (offset + size - 1) / page_size;
  Spans doomed;
  for (std::size_t i = first; i <= last; ++i) {
    Range::Piece& piece = range.at(i);
    if (--piece.pins == 0 && (piece.doomed || range.auto_retire)) doomed.push_back({i, 1});
  }
  if (doomed.empty()) return;
  DriverScope scope(driver_, context_.handle);
  retire_locked(range, doomed);
  reap_later(done);
}

Backing Mapper::backing(Range& range, std::size_t piece) {
  std::lock_guard<std::mutex> lock(mutex);
  return piece < range.held_.table.size() ? range.at(piece).backing : Backing::kNone;
}

std::vector<std::tuple<std::size_t, std::size_t, Backing>> Mapper::runs(Range& range, std::size_t first,
                                                                        std::size_t count) {
  std::vector<std::tuple<std::size_t, std::size_t, Backing>> found;
  std::lock_guard<std::mutex> lock(mutex);
  for (std::size_t piece = first; piece < first + count; ++piece) {
    const Backing backing = piece < range.held_.table.size() ? range.at(piece).backing : Backing::kNone;
    if (found.empty() || std::get<2>(found.back()) != backing) found.emplace_back(piece, 0, backing);
    ++std::get<1>(found.back());
  }
  return found;
}

PageId Mapper::page(Range& range, std::size_t piece) {
  std::lock_guard<std::mutex> lock(mutex);
  return piece < range.held_.table.size() ? range.at(piece).page : kNoPage;
}

std::optional<Place> Mapper::place(Range& range, std::size_t piece) {
  std::lock_guard<std::mutex> lock(mutex);
  if (piece >= range.held_.table.size() || range.at(piece).page == kNoPage) return {};
  return range.at(piece).place;
}

std::size_t Mapper::backed(Range& range) {
  std::lock_guard<std::mutex> lock(mutex);
  const auto counts = [](const auto& piece) { return leads_somewhere(piece.backing); };
  return static_cast<std::size_t>(std::count_if(range.held_.table.begin(), range.held_.table.end(), counts));
}

void Mapper::note_stream(CUstream stream) {
  if (streams_.known(stream)) return;
  std::lock_guard<std::mutex> lock(mutex);
  streams_.note(stream);
}

void Mapper::note_stream_at(CUdeviceptr address, CUstream stream) {
  if (streams_.known(stream)) return;
  std::lock_guard<std::mutex> lock(mutex);
  if (covers(address)) streams_.note(stream);
}

bool Mapper::covers(CUdeviceptr address) const {
  return std::any_of(ranges_.begin(), ranges_.end(), [&](const Range* range) {
    return range->held_.pieces > 0 && address >= range->base && address - range->base < range->pieces * page_size;
  });
}

CUstream Mapper::create_stream() {
  DriverScope scope(driver_, context_.handle);
  CUstream stream = nullptr;
  driver_.cuStreamCreate(&stream, cuda::kStreamNonBlocking).or_throw("creating a stream");
  return stream;
}

void Mapper::destroy_stream(CUstream stream) {
  DriverScope scope(driver_, context_.handle);
  driver_.cuStreamSynchronize(stream);
  std::lock_guard<std::mutex> lock(mutex);
  streams_.forget(stream);
  driver_.cuStreamDestroy(stream);
}

void Mapper::open_transfer_streams() {
  for (CUstream* stream : {&to_device_, &from_device_}) {
    std::lock_guard<std::mutex> lock(mutex);
    if (*stream != nullptr) continue;
    *stream = create_stream();
    streams_.note(*stream);  // a page that is copied to or from does not leave before
  }
}

void Mapper::note_use(CUdeviceptr address, std::size_t size, CUstream stream, bool write) {
  if (!driver_.is_standin()) return;
  DriverScope scope(driver_, context_.handle);
  driver_.note_use(address, size, stream, write);
}

void Mapper::note_use(Range& range, CUstream stream, bool write) {
  if (!driver_.is_standin()) return note_stream(stream);
  std::lock_guard<std::mutex> lock(mutex);
  DriverScope scope(driver_, context_.handle);
  const std::size_t end = range.held_.table.size();
  for (std::size_t from = 0, to = 0; from < end; from = to + 1) {
    for (to = from; to < end && leads_somewhere(range.at(to).backing);) ++to;
    if (to > from) driver_.note_use(address(range, from), (to - from) * page_size, stream, write);
  }
}

void Mapper::synchronize() {
  DriverScope scope(driver_, context_.handle);
  driver_.cuCtxSynchronize().or_throw("waiting for the device");
}

Fence Mapper::fence_over(const std::vector<CUstream>& streams) {
  std::lock_guard<std::mutex> lock(mutex);
  DriverScope scope(driver_, context_.handle);
  Fence made = streams_.fence(streams);
  if (streams_.sync_wanted()) background_.notify();
  return made;
}

bool Mapper::fence_passed(Fence& fence) {
  std::lock_guard<std::mutex> lock(mutex);
  DriverScope scope(driver_, context_.handle);
  const bool passed = streams_.passed(fence);
  if (!passed && streams_.sync_wanted()) background_.notify();
  return passed;
}

void Mapper::fence_wait(Fence& fence) {
  DriverScope scope(driver_, context_.handle);
  Lock lock(mutex);
  await(lock, streams_.awaited(fence));
  streams_.recycle(fence);
}

Awaited Mapper::awaited(Fence& fence) {
  std::lock_guard<std::mutex> lock(mutex);
  DriverScope scope(driver_, context_.handle);
  return streams_.awaited(fence);
}

void Mapper::wait(const Awaited& awaited) {
  DriverScope scope(driver_, context_.handle);
  Lock lock(mutex);
  await(lock, awaited);
}

// Waits, without the lock. Should someone else see the fence pass meanwhile, its events are used again: this waits for
// too much then, never for too little.
void Mapper::await(Lock& lock, const Awaited& awaited) {
  if (awaited.events.empty() && awaited.sync <= streams_.syncs_done()) return;
  const std::uint64_t sync = awaited.sync > streams_.syncs_done() ? streams_.begin_sync() : 0;
  {
    Unlocked unlocked(lock);
    streams_.wait(awaited.events);
    if (sync != 0) driver_.cuCtxSynchronize().or_throw("waiting for every stream before pages change hands");
  }
  if (sync != 0) streams_.end_sync(sync);
}

void Mapper::recycle(Fence& fence) {
  std::lock_guard<std::mutex> lock(mutex);
  streams_.recycle(fence);
}

// Not under the lock: on the stand-in the calling thread is stream 0, and waits here. For the events as in `await`.
void Mapper::stream_waits(CUstream stream, const Fence& fence) {
  DriverScope scope(driver_, context_.handle);
  std::unique_lock<std::mutex> lock(mutex);
  const std::vector<CUevent> events = fence.events;
  lock.unlock();
  // Nothing that is captured may wait for what is not: then the host does.
  if (!events.empty() && streams_.capturing(std::vector<CUstream>{stream})) return streams_.wait(events);
  for (CUevent event : events) {
    driver_.cuStreamWaitEvent(stream, event, 0U).or_throw("ordering work after a copy");
  }
}

bool Mapper::capturing() {
  std::lock_guard<std::mutex> lock(mutex);
  DriverScope scope(driver_, context_.handle);
  return streams_.capturing();
}

void Mapper::captures_may_begin() {
  std::lock_guard<std::mutex> lock(mutex);
  streams_.captures_may_begin();
}

void Mapper::captures_are_over(std::size_t count) {
  std::lock_guard<std::mutex> lock(mutex);
  streams_.captures_are_over(count);
}

void Mapper::set_budget(std::size_t pages) {
  Ranges done;
  std::lock_guard<std::mutex> lock(mutex);
  DriverScope scope(driver_, context_.handle);
  if (pages < device_.created() && !streams_.capturing()) {
    reap_locked(done);
    expect_no_more();
    empty_slots(device_.created() - pages, Take::kAll);
  }
  device_.set_budget(pages);
}

bool Mapper::within_budget() {
  Ranges done;
  std::lock_guard<std::mutex> lock(mutex);
  DriverScope scope(driver_, context_.handle);
  if (device_.created() > device_.budget() && !streams_.capturing()) {
    reap_locked(done);
    empty_slots(device_.created() - device_.budget(), Take::kAll);
  }
  device_.shrink();
  return !device_.above_budget();
}

void Mapper::release_free() {
  std::lock_guard<std::mutex> lock(mutex);
  DriverScope scope(driver_, context_.handle);
  expect_no_more();
  empty_slots(device_.created(), Take::kAll);
  for (Pool* pool : {&device_, &host_, &peer_}) pool->release_free();
}

std::pair<std::size_t, std::size_t> Mapper::free_memory() {
  DriverScope scope(driver_, context_.handle);
  std::size_t free = 0, total = 0;
  driver_.cuMemGetInfo(&free, &total).or_throw("reading the device's free memory");
  return {free, total};
}

Mapper::Numbers Mapper::numbers() {
  std::lock_guard<std::mutex> lock(mutex);
  return {device_.budget(),
          device_.created(),
          device_.created_peak(),
          host_.created(),
          host_.budget(),
          host_.count(Owner::kFree),
          ranges_.size(),
          peer_.created(),
          peer_.budget(),
          peer_.count(Owner::kFree),
          device_.counts(),
          copied_,
          device_.kept() - ahead_,
          ahead_,
          driver_.page_table_time(),
          host_.count(Owner::kActivations)};
}

void Mapper::reset_peak() {
  std::lock_guard<std::mutex> lock(mutex);
  device_.reset_peak();
}

std::size_t Mapper::retiring() {
  std::lock_guard<std::mutex> lock(mutex);
  return retiring_.size();
}

std::size_t Mapper::available() {
  std::lock_guard<std::mutex> lock(mutex);
  return device_.available();
}

Room Mapper::room_for_twins() {
  std::lock_guard<std::mutex> lock(mutex);
  return room_for_twins_locked();
}

Room Mapper::room_for_twins_locked() const { return {context_.host_pages ? host_.available() : 0, peer_.available()}; }

std::size_t Mapper::missing(std::size_t n) {
  std::lock_guard<std::mutex> lock(mutex);
  return device_.missing(n);
}

void Mapper::shutdown() {
  Ranges done;
  Lock lock(mutex);
  if (shut_) return;
  DriverScope scope(driver_, context_.handle);
  reap_waiting(lock, done);
  if (!retiring_.empty()) reap_waiting(lock, done);  // an unmap that failed once
  const std::size_t open = static_cast<std::size_t>(
      std::count_if(ranges_.begin(), ranges_.end(), [](Range* range) { return !range->closed_; }));
  if (open > 0) throw UsageError(format("%zu ranges are still open: release the models and caches first", open));
  const bool cleared = clear_scratch() || clear_scratch();
  empty_slots(device_.created(), Take::kAll);
  const std::size_t left = device_.release_free() + host_.release_free() + peer_.release_free();
  if (!cleared || !retiring_.empty() || left > 0 || device_.kept() > 0) {
    throw UsageError("the driver did not take back all pages; close the device again");
  }
  device_.set_budget(0);  // what a tensor that is still alive gives back later goes to the driver
  host_.set_budget(0);
  peer_.set_budget(0);
  shut_ = true;
}

}  // namespace ballonet
