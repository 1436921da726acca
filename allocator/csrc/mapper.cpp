#include "mapper.h"

#include <algorithm>

namespace ballonet {
namespace {

int attribute(const Driver& driver, int which, CUdevice device) {
  int value = 0;
  // A driver that does not know an attribute does not have what it stands for.
  return driver.cuDeviceGetAttribute(&value, which, device).ok() ? value : 0;
}

}  // namespace

Mapper::Opened::Opened(const Driver& driver_, const Options& options) : driver(driver_), page_size(options.page_size) {
  driver.configure(options.standin);
  driver.cuInit(0U).or_throw("starting the driver");
  driver.cuDeviceGet(&device, options.ordinal).or_throw(format("looking for device %d", options.ordinal));
  if (attribute(driver, cuda::kAttributeVirtualMemory, device) == 0) {
    throw DriverUnavailable(
        format("device %d cannot map memory (cuMemMap): ballonet cannot run on it. Some virtual GPUs and "
               "WSL2 set-ups refuse this; use torch's own allocator there",
               options.ordinal));
  }
  driver.cuDeviceTotalMem(&total_memory, device).or_throw("reading the device's size");
  device_place.type = cuda::kAllocationPinned;
  device_place.requestedHandleTypes =
      attribute(driver, cuda::kAttributePosixFd, device) != 0 ? cuda::kHandlePosixFd : cuda::kHandleNone;
  device_place.location = {cuda::kLocationDevice, device};
  host_place = device_place;
  host_place.location = {cuda::kLocationHostNuma, std::max(0, attribute(driver, cuda::kAttributeHostNumaId, device))};
  host_pages = attribute(driver, cuda::kAttributeHostNumaVirtualMemory, device) != 0;
  access = {{cuda::kLocationDevice, device}, cuda::kAccessReadWrite};

  driver.cuDevicePrimaryCtxRetain(&context, device).or_throw("opening the device's primary context");
  try {
    DriverScope scope(driver, context);
    std::size_t granularity = 0;
    driver.cuMemGetAllocationGranularity(&granularity, &device_place, cuda::kGranularityMinimum).or_throw();
    if (page_size == 0 || page_size % granularity != 0) {
      throw UsageError(format("the page size must be a multiple of %s on this device, not %s",
                              in_units(granularity).c_str(), in_units(page_size).c_str()));
    }
    driver.cuStreamCreate(&copy_stream, cuda::kStreamNonBlocking).or_throw("creating the copy stream");
    const auto reserved = driver.cuMemAddressReserve(&scratch, page_size, std::size_t{0}, CUdeviceptr{0}, 0ULL);
    if (!reserved.ok()) driver.cuStreamDestroy(copy_stream);
    reserved.or_throw("reserving addresses for one page");
  } catch (...) {
    driver.cuDevicePrimaryCtxRelease(device);
    throw;
  }
}

Mapper::Opened::~Opened() {
  {
    DriverScope scope(driver, context);
    driver.cuMemAddressFree(scratch, page_size);
    driver.cuStreamDestroy(copy_stream);
  }
  driver.cuDevicePrimaryCtxRelease(device);
}

Mapper::Mapper(const Options& options)
    : page_size(options.page_size),
      ordinal(options.ordinal),
      driver_(options.library),
      opened_(driver_, options),
      device_(driver_, opened_.device_place, options.page_size, options.budget, &journal),
      host_(driver_, opened_.host_place, options.page_size, options.host_budget, nullptr),
      streams_(driver_) {}

Mapper::~Mapper() {
  DriverScope scope(driver_, opened_.context);
  device_.release_free();
  host_.release_free();
  streams_.close();
}

Range::Range(std::shared_ptr<Mapper> mapper_, CUdeviceptr base_, std::size_t pieces_, Owner owner_,
             std::shared_ptr<Group> group_)
    : base(base_), pieces(pieces_), owner(owner_), group(std::move(group_)), mapper(std::move(mapper_)) {}

// Pre: nothing is mapped: `close` retired everything, and retirements and pins keep the range alive.
Range::~Range() { mapper->forget(*this); }

Range::Piece& Range::at(std::size_t piece) {
  if (piece >= table_.size()) table_.resize(piece + 1);
  return table_[piece];
}

std::shared_ptr<Range> Mapper::reserve(std::size_t pieces, Owner owner, std::shared_ptr<Group> group) {
  if (pieces == 0) throw UsageError("a range needs at least one page");
  std::shared_ptr<Range> range;  // destroyed, where something fails below, once the lock is released
  std::lock_guard<std::mutex> lock(mutex);
  DriverScope scope(driver_, opened_.context);
  CUdeviceptr base = 0;
  driver_.cuMemAddressReserve(&base, pieces * page_size, std::size_t{0}, CUdeviceptr{0}, 0ULL)
      .or_throw(format("reserving %s of addresses", in_units(pieces * page_size).c_str()));
  range = std::make_shared<Range>(shared_from_this(), base, pieces, owner, std::move(group));
  ranges_.insert(range.get());
  return range;
}

void Mapper::forget(Range& range) {
  std::lock_guard<std::mutex> lock(mutex);
  DriverScope scope(driver_, opened_.context);
  ranges_.erase(&range);
  const std::size_t size = range.pieces * page_size;
  // Addresses that the driver does not take back are lost as addresses only; no memory is behind them.
  if (!driver_.cuMemAddressFree(range.base, size).ok()) driver_.cuMemAddressFree(range.base, size);
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

void Mapper::allow_access(CUdeviceptr at, std::size_t pages) {
  driver_.cuMemSetAccess(at, pages * page_size, &opened_.access, std::size_t{1})
      .or_throw(format("opening %zu pages", pages));
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
    }
    for (std::size_t from = 0, to = 0; from < pieces.size(); from = to) {
      to = from + 1;
      while (to < pieces.size() && pieces[to] == pieces[to - 1] + 1) ++to;
      allow_access(address(range, pieces[from]), to - from);
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

void Mapper::map(Range& range, std::size_t first, std::size_t count, Place place) {
  Ranges done;
  std::lock_guard<std::mutex> lock(mutex);
  check_span(range, first, count);
  if (place == Place::kHost && !opened_.host_pages) {
    throw UsageError(
        "this driver cannot map host memory at a device address; `python -m ballonet info` says what it can");
  }
  const Backing wanted = place == Place::kDevice ? Backing::kDevice : Backing::kHost;
  Pool& pool = pool_of(place);
  DriverScope scope(driver_, opened_.context);
  reap_locked(false, done);

  std::vector<std::size_t> unbacked, readopted;
  for (std::size_t i = first; i < first + count; ++i) {
    Range::Piece& piece = range.at(i);
    if (piece.backing == Backing::kRetiring && piece.retiring_from != wanted) reap_locked(true, done);
    if (piece.backing == Backing::kNone) {
      unbacked.push_back(i);
    } else if (piece.backing == wanted || (piece.backing == Backing::kRetiring && piece.retiring_from == wanted)) {
      readopted.push_back(i);
    } else {
      throw UsageError(format("piece %zu already has another backing", i));
    }
  }
  PageId hint = kNoPage;
  if (!unbacked.empty() && unbacked.front() > 0) {
    const Range::Piece& before = range.at(unbacked.front() - 1);
    if (before.backing == wanted) hint = before.page + 1;
  }
  for (std::size_t i : readopted) {  // a mapping that failed half way may have left a page without access
    Range::Piece& piece = range.at(i);
    if (!piece.open) allow_access(address(range, i), 1);
    piece.open = true;
  }
  std::vector<PageId> pages;
  if (!unbacked.empty()) {
    if (pool.available() < unbacked.size() && !streams_.capturing()) reap_locked(true, done);
    pages = pool.take(unbacked.size(), range.owner, hint);
    back(range, unbacked, pool, pages, wanted);
  }
  for (std::size_t i : readopted) {
    Range::Piece& piece = range.at(i);
    piece.doomed = false;
    if (piece.backing != Backing::kRetiring) continue;
    piece.backing = wanted;
    piece.ticket = 0;
    pool.relabel(piece.page, range.owner);
  }
}

void Mapper::alias(Range& range, std::size_t first, Range& source, std::size_t source_first, std::size_t count) {
  Ranges done;
  std::lock_guard<std::mutex> lock(mutex);
  check_span(range, first, count);
  check_span(source, source_first, count);
  DriverScope scope(driver_, opened_.context);
  reap_locked(false, done);
  std::vector<std::size_t> pieces;
  std::vector<PageId> pages;
  for (std::size_t i = 0; i < count; ++i) {
    if (range.at(first + i).backing == Backing::kRetiring) reap_locked(true, done);
    if (range.at(first + i).backing != Backing::kNone) throw UsageError(format("piece %zu is backed", first + i));
    if (source.at(source_first + i).backing != Backing::kDevice) {
      throw UsageError(format("piece %zu of the slot has no device page", source_first + i));
    }
    pieces.push_back(first + i);
    pages.push_back(source.at(source_first + i).page);
  }
  back(range, pieces, device_, pages, Backing::kAlias);
}

void Mapper::retire(Range& range, const Spans& spans) {
  Ranges done;
  std::lock_guard<std::mutex> lock(mutex);
  for (const Span& span : spans) check_span(range, span.first, span.count);
  DriverScope scope(driver_, opened_.context);
  retire_locked(range, spans);
  reap_locked(false, done);
}

void Mapper::retire_locked(Range& range, const Spans& spans) {
  const std::uint32_t ticket = next_ticket_++;
  bool any = false;
  for (const Span& span : spans) {
    for (std::size_t i = span.first; i < std::min(span.first + span.count, range.table_.size()); ++i) {
      Range::Piece& piece = range.at(i);
      if (piece.backing == Backing::kNone || piece.backing == Backing::kRetiring) continue;
      if (piece.pins > 0) {
        piece.doomed = true;
        continue;
      }
      if (piece.backing != Backing::kAlias) pool_of(piece).relabel(piece.page, Owner::kRetiring);
      piece.retiring_from = piece.backing;
      piece.backing = Backing::kRetiring;
      piece.ticket = ticket;
      piece.doomed = false;
      any = true;
    }
  }
  if (any) retiring_.push_back({streams_.fence(), range.shared_from_this(), spans, ticket});
}

std::size_t Mapper::reap(bool wait) {
  Ranges done;
  std::lock_guard<std::mutex> lock(mutex);
  DriverScope scope(driver_, opened_.context);
  return reap_locked(wait, done);
}

std::size_t Mapper::reap_locked(bool wait, Ranges& done) {
  std::size_t freed = 0;
  // A retirement whose unmap fails goes to the back of the queue, and is met once per reap.
  for (std::size_t left = retiring_.size(); left > 0; --left) {
    Retirement& oldest = retiring_.front();
    if (wait) {
      streams_.wait(oldest.fence);
    } else if (!streams_.passed(oldest.fence)) {
      break;
    }
    Retirement current = std::move(oldest);
    retiring_.pop_front();
    if (unmap_retired(current, freed)) {
      done.push_back(std::move(current.range));
    } else {
      retiring_.push_back(std::move(current));
    }
  }
  return freed;
}

// False where a page could not be unmapped now.
bool Mapper::unmap_retired(Retirement& retirement, std::size_t& freed) {
  bool all = true;
  Range& range = *retirement.range;
  for (const Span& span : retirement.spans) {
    for (std::size_t i = span.first; i < std::min(span.first + span.count, range.table_.size()); ++i) {
      const Range::Piece& piece = range.at(i);
      if (piece.backing != Backing::kRetiring || piece.ticket != retirement.ticket) continue;  // taken back meanwhile
      if (unmap_piece(range, i)) {
        ++freed;
      } else {
        all = false;
      }
    }
  }
  return all;
}

bool Mapper::unmap_piece(Range& range, std::size_t index) {
  if (!driver_.cuMemUnmap(address(range, index), page_size).ok()) return false;
  Range::Piece& piece = range.at(index);
  Pool& pool = pool_of(piece);
  const PageId page = piece.page;
  piece.page = kNoPage;
  piece.backing = piece.retiring_from = Backing::kNone;
  piece.ticket = 0;
  piece.open = false;
  --pool.mappings(page);
  release_page(pool, page);
  return true;
}

// A retiring page is free once nothing leads to it any more.
void Mapper::release_page(Pool& pool, PageId page) {
  if (pool.owner(page) == Owner::kRetiring && pool.mappings(page) == 0) pool.give(page);
}

Pool& Mapper::pool_of(const Range::Piece& piece) {
  const Backing backing = piece.backing == Backing::kRetiring ? piece.retiring_from : piece.backing;
  return backing == Backing::kHost ? host_ : device_;
}

bool Mapper::clear_scratch() {
  if (scratch_pool_ == nullptr) return true;
  if (!driver_.cuStreamSynchronize(opened_.copy_stream).ok()) return false;  // no fence covers the copy stream
  if (!driver_.cuMemUnmap(opened_.scratch, page_size).ok()) return false;
  --scratch_pool_->mappings(scratch_page_);
  release_page(*scratch_pool_, scratch_page_);
  scratch_pool_ = nullptr;
  scratch_page_ = kNoPage;
  return true;
}

bool Mapper::move(Range& range, std::size_t index, Place to) {
  Ranges done;
  std::unique_lock<std::mutex> lease;
  if (range.group) lease = std::unique_lock<std::mutex>(range.group->mutex);
  if (range.group && range.group->leased_by_others()) return false;
  std::lock_guard<std::mutex> lock(mutex);
  check_span(range, index, 1);
  if (to == Place::kHost && !opened_.host_pages) return false;
  Range::Piece& piece = range.at(index);
  const bool movable = (piece.backing == Backing::kDevice || piece.backing == Backing::kHost) && !piece.doomed;
  if (!movable || pool_of(piece).mappings(piece.page) != 1) return false;

  DriverScope scope(driver_, opened_.context);
  if (streams_.capturing()) return false;
  Fence fence = streams_.fence();
  try {
    streams_.wait(fence);
  } catch (...) {
    streams_.recycle(fence);
    throw;
  }
  reap_locked(false, done);
  Pool& source = pool_of(piece);
  Pool& target = pool_of(to);
  if (!clear_scratch() || target.available() == 0) return false;
  const PageId old = piece.page;
  PageId fresh;
  try {
    fresh = target.take(1, range.owner).front();
  } catch (const PoolExhausted&) {
    return false;
  }

  // Fill the new page at the scratch addresses.
  const CUdeviceptr here = address(range, index);
  try {
    map_page(opened_.scratch, target, fresh);
    scratch_pool_ = &target;
    scratch_page_ = fresh;
    allow_access(opened_.scratch, 1);
    driver_.cuMemcpyAsync(opened_.scratch, here, page_size, opened_.copy_stream).or_throw("copying a page");
    if (!clear_scratch()) {
      throw DriverError("cuMemUnmap", cuda::kUnknown, "a failure",
                        "waiting for the copy of a page and clearing its addresses");
    }
    driver_.cuMemUnmap(here, page_size).or_throw("taking a page from its address");
  } catch (...) {
    target.relabel(fresh, Owner::kRetiring);
    if (clear_scratch() && target.owner(fresh) == Owner::kRetiring) release_page(target, fresh);
    throw;
  }
  --source.mappings(old);

  // From here on the piece is bare: put the new page there, or, where that fails, the old one.
  const auto settle = [&](Pool& pool, PageId page) {
    map_page(here, pool, page);
    try {
      allow_access(here, 1);
    } catch (...) {
      if (driver_.cuMemUnmap(here, page_size).ok()) --pool.mappings(page);
      throw;
    }
  };
  try {
    settle(target, fresh);
  } catch (...) {
    target.relabel(fresh, Owner::kRetiring);
    release_page(target, fresh);
    for (int left = 3; left > 0; --left) {
      try {
        settle(source, old);
        break;
      } catch (...) {
        if (left > 1) continue;
        // The driver refuses every mapping. The bytes are lost; the books are not.
        piece.page = kNoPage;
        piece.backing = Backing::kNone;
        piece.open = false;
        source.relabel(old, Owner::kRetiring);
        release_page(source, old);
      }
    }
    throw;
  }
  const Place from = piece.backing == Backing::kDevice ? Place::kDevice : Place::kHost;
  count_copy(range.owner, from, to);
  piece.page = fresh;
  piece.backing = to == Place::kDevice ? Backing::kDevice : Backing::kHost;
  source.relabel(old, Owner::kRetiring);
  release_page(source, old);
  return true;
}

void Mapper::count_copy(Owner owner, Place from, Place to) {
  if (from == to) return;
  const bool down = to == Place::kHost;
  if (owner == Owner::kWeights) (down ? copied_.weights_d2h : copied_.weights_h2d) += page_size;
  if (owner == Owner::kKv) (down ? copied_.kv_d2h : copied_.kv_h2d) += page_size;
}

void Mapper::close(Range& range) {
  Ranges done;
  std::lock_guard<std::mutex> lock(mutex);
  if (range.closed_) return;
  DriverScope scope(driver_, opened_.context);
  retire_locked(range, {{0, range.pieces}});
  range.closed_ = true;
  reap_locked(false, done);
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
    if (piece.backing == Backing::kNone || piece.backing == Backing::kRetiring || piece.doomed) {
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
  const std::size_t first = offset / page_size, last = (offset + size - 1) / page_size;
  Spans doomed;
  for (std::size_t i = first; i <= last; ++i) {
    Range::Piece& piece = range.at(i);
    if (--piece.pins == 0 && piece.doomed) doomed.push_back({i, 1});
  }
  if (doomed.empty()) return;
  DriverScope scope(driver_, opened_.context);
  retire_locked(range, doomed);
  reap_locked(false, done);
}

Backing Mapper::backing(Range& range, std::size_t piece) {
  std::lock_guard<std::mutex> lock(mutex);
  return piece < range.table_.size() ? range.at(piece).backing : Backing::kNone;
}

PageId Mapper::page(Range& range, std::size_t piece) {
  std::lock_guard<std::mutex> lock(mutex);
  return piece < range.table_.size() ? range.at(piece).page : kNoPage;
}

void Mapper::note_stream(CUstream stream) {
  std::lock_guard<std::mutex> lock(mutex);
  streams_.note(stream);
}

void Mapper::note_use(CUdeviceptr address, std::size_t size, CUstream stream, bool write) {
  if (!driver_.is_standin()) return;
  DriverScope scope(driver_, opened_.context);
  driver_.note_use(address, size, stream, write);
}

void Mapper::synchronize() {
  DriverScope scope(driver_, opened_.context);
  driver_.cuCtxSynchronize().or_throw("waiting for the device");
}

Fence Mapper::fence_over(const std::vector<CUstream>& streams) {
  std::lock_guard<std::mutex> lock(mutex);
  DriverScope scope(driver_, opened_.context);
  return streams_.fence(streams);
}

bool Mapper::fence_passed(Fence& fence) {
  std::lock_guard<std::mutex> lock(mutex);
  DriverScope scope(driver_, opened_.context);
  return streams_.passed(fence);
}

void Mapper::fence_wait(Fence& fence) {
  std::lock_guard<std::mutex> lock(mutex);
  DriverScope scope(driver_, opened_.context);
  streams_.wait(fence);
}

bool Mapper::capturing() {
  std::lock_guard<std::mutex> lock(mutex);
  DriverScope scope(driver_, opened_.context);
  return streams_.capturing();
}

void Mapper::set_budget(std::size_t pages) {
  Ranges done;
  std::lock_guard<std::mutex> lock(mutex);
  DriverScope scope(driver_, opened_.context);
  if (pages < device_.created() && !streams_.capturing()) reap_locked(true, done);
  device_.set_budget(pages);
}

void Mapper::release_free() {
  std::lock_guard<std::mutex> lock(mutex);
  DriverScope scope(driver_, opened_.context);
  device_.release_free();
  host_.release_free();
}

std::pair<std::size_t, std::size_t> Mapper::free_memory() {
  DriverScope scope(driver_, opened_.context);
  std::size_t free = 0, total = 0;
  driver_.cuMemGetInfo(&free, &total).or_throw("reading the device's free memory");
  return {free, total};
}

Mapper::Numbers Mapper::numbers() {
  Ranges done;
  std::lock_guard<std::mutex> lock(mutex);
  if (!retiring_.empty()) {
    DriverScope scope(driver_, opened_.context);
    reap_locked(false, done);
  }
  return {device_.budget(), device_.created(), device_.created_peak(), host_.created(),
          host_.budget(),   ranges_.size(),    device_.counts(),       copied_};
}

void Mapper::reset_peak() {
  std::lock_guard<std::mutex> lock(mutex);
  device_.reset_peak();
}

std::size_t Mapper::available() {
  std::lock_guard<std::mutex> lock(mutex);
  return device_.available();
}

void Mapper::check() {
  std::lock_guard<std::mutex> lock(mutex);
  device_.check();
  host_.check();
  std::map<std::pair<Pool*, PageId>, unsigned> seen, owned;
  for (Range* range : ranges_) {
    for (std::size_t i = 0; i < range->table_.size(); ++i) {
      const Range::Piece& piece = range->table_[i];
      if (piece.backing == Backing::kNone) {
        if (piece.page != kNoPage) throw InvariantBroken(format("unbacked piece %zu names page %u", i, piece.page));
        continue;
      }
      Pool* pool = &pool_of(piece);
      ++seen[{pool, piece.page}];
      const bool retiring = piece.backing == Backing::kRetiring;
      if ((retiring ? piece.retiring_from : piece.backing) == Backing::kAlias) continue;
      ++owned[{pool, piece.page}];
      if (pool->owner(piece.page) != (retiring ? Owner::kRetiring : range->owner)) {
        throw InvariantBroken(format("page %u behind piece %zu has another owner than its range", piece.page, i));
      }
    }
  }
  if (scratch_pool_ != nullptr) ++seen[{scratch_pool_, scratch_page_}], ++owned[{scratch_pool_, scratch_page_}];
  for (const auto& [key, mappings] : seen) {
    if (key.first->mappings(key.second) != mappings) {
      throw InvariantBroken(format("page %u is mapped %u times, its book says %u", key.second, mappings,
                                   key.first->mappings(key.second)));
    }
  }
  for (const auto& [key, owners] : owned) {
    if (owners != 1) throw InvariantBroken(format("page %u is behind %u pieces that own it", key.second, owners));
  }
  for (Pool* pool : {&device_, &host_}) {
    const std::size_t used = pool->created() - pool->count(Owner::kFree);
    const auto backed =
        std::count_if(seen.begin(), seen.end(), [pool](const auto& entry) { return entry.first.first == pool; });
    if (used != static_cast<std::size_t>(backed)) {
      throw InvariantBroken(
          format("%zu pages have an owner, %zu are behind an address", used, static_cast<std::size_t>(backed)));
    }
  }
}

void Mapper::shutdown() {
  Ranges done;
  std::lock_guard<std::mutex> lock(mutex);
  if (shut_) return;
  DriverScope scope(driver_, opened_.context);
  reap_locked(true, done);
  if (!retiring_.empty()) reap_locked(true, done);  // an unmap that failed once
  const std::size_t open = static_cast<std::size_t>(
      std::count_if(ranges_.begin(), ranges_.end(), [](Range* range) { return !range->closed_; }));
  if (open > 0) throw UsageError(format("%zu ranges are still open: release the models and caches first", open));
  const bool cleared = clear_scratch() || clear_scratch();
  const std::size_t left = device_.release_free() + host_.release_free();
  if (!cleared || !retiring_.empty() || left > 0) {
    throw UsageError("the driver did not take back all pages; close the device again");
  }
  device_.set_budget(0);  // what a tensor that is still alive gives back later goes to the driver
  host_.set_budget(0);
  shut_ = true;
}

}  // namespace ballonet
