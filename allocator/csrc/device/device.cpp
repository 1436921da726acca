#include "device/device.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include "heap/heap_report.h"

namespace ballonet {

Device::Device(const Mapper::Options& options, bool spill)
    : mapper(std::make_shared<Mapper>(options)), reclaim(mapper), heap(mapper, reclaim, spill), asked_(options.budget) {
  mapper->background.start();
}

Device::~Device() {
  try {
    close();
  } catch (const std::exception&) {
    // Blocks are still in use, and a destructor cannot throw: the pages go with their ranges.
  }
  mapper->stop_background();
}

void Device::map(Range& range, std::size_t first, std::size_t count, Place place) {
  if (place == Place::kDevice) return with_idle_pages(count, [&] { mapper->map(range, first, count, place); });
  try {
    mapper->map(range, first, count, place);
  } catch (const PoolExhausted& reason) {
    if (place == Place::kPeer) throw;  // the caller falls back to the host
    mapper->events.add(Events::Kind::kRefuse, count);
    throw PoolExhausted(host_exhausted(*mapper, count, reason.what()));
  }
}

bool Device::own(Range& range, std::size_t first, std::size_t count) {
  return with_idle_pages(count, [&] { return mapper->aliasing.own(range, first, count); });
}

// Runs `attempt`, which needs so many device pages, again while the heap has idle ones to give, and then with reclaimed
// ones.
template <class Attempt>
auto Device::with_idle_pages(std::size_t pages, Attempt attempt) -> decltype(attempt()) {
  const auto with_idle = [&] {
    for (;;) {
      try {
        return attempt();
      } catch (const PoolExhausted& reason) {
        const std::int64_t since = now_ns();
        const std::size_t idle = heap.give(reason.missing);
        if (idle == 0) throw;
        mapper->events.add(Events::Kind::kInflate, idle, since);
      }
    }
  };
  try {
    return reclaim.supply(with_idle);
  } catch (const PoolExhausted& reason) {
    mapper->events.add(Events::Kind::kRefuse, pages);
    std::lock_guard<std::mutex> lock(heap.mutex);
    throw PoolExhausted(heap.exhausted(pages * mapper->space.page_size, reason.what(), reason.missing));
  }
}

void Device::set_budget(std::size_t bytes, std::int64_t wait_ns, const std::function<void()>& pause) {
  const std::size_t pages = bytes / mapper->space.page_size;
  const std::int64_t since = now_ns();
  if (pages < mapper->numbers().created) {
    if (const std::size_t fixed = immovable(); fixed > pages) {
      mapper->events.add(Events::Kind::kBudgetRefused, pages, since);
      throw BudgetInUse(fixed * mapper->space.page_size, bytes, 0);
    }
  }
  std::size_t ticket, before;
  {
    std::lock_guard<std::mutex> lock(budget_mutex_);
    if (!pending_) met_ = asked_;
    ticket = ++newest_;
    pending_ = true;
    before = met_;
    asked_ = pages;
    apply_budget();
  }
  try {
    shrink(pages, ticket, wait_ns < INT64_MAX - since ? since + wait_ns : INT64_MAX, pause);
  } catch (...) {
    std::lock_guard<std::mutex> lock(budget_mutex_);
    mapper->events.add(Events::Kind::kBudgetRefused, pages, since, static_cast<std::int64_t>(before));
    if (ticket == newest_) {
      pending_ = false;
      asked_ = met_;
      apply_budget();
    }
    throw;
  }
  mapper->events.add(Events::Kind::kBudget, pages, since, static_cast<std::int64_t>(before));
}

// Pre: the budget's lock is held.
void Device::apply_budget() {
  const auto allowed = static_cast<double>(mapper->space.context.total_memory / mapper->space.page_size) * fraction_;
  mapper->set_budget(fraction_ < 1.0 ? std::min(asked_, static_cast<std::size_t>(allowed)) : asked_);
}

void Device::set_fraction(double fraction) {
  {
    std::lock_guard<std::mutex> lock(budget_mutex_);
    fraction_ = fraction;
    heap.allow_spilling(fraction == 1.0);
    apply_budget();
  }
  heap.shrink(false);
}

double Device::fraction() {
  std::lock_guard<std::mutex> lock(budget_mutex_);
  return fraction_;
}

// Device pages that cannot be given back, or fewer: a page that its range has given back, and that another range still
// shows, is not counted, as that range may let it go in time.
std::size_t Device::immovable() {
  const std::size_t idle = heap.idle_pages(true);
  const Reclaim::Outlook entries = reclaim.outlook();
  const auto numbers = mapper->numbers();
  const auto pages = [&](Owner owner) { return numbers.pages[static_cast<std::size_t>(owner)]; };
  const std::size_t movable = pages(Owner::kFree) + pages(Owner::kRetiring) + idle + entries.ready + entries.leased;
  return numbers.created - std::min(numbers.created, movable);
}

// Waits until no more exists than the budget allows. Throws BudgetInUse once the time is up or another is asked for.
void Device::shrink(std::size_t pages, std::size_t ticket, std::int64_t deadline, const std::function<void()>& pause) {
  const std::int64_t since = now_ns();
  for (unsigned round = 0;; ++round) {
    heap.shrink(round == 0);
    if (!mapper->within_budget()) reclaim.shrink();
    const bool within = mapper->within_budget();
    {
      std::lock_guard<std::mutex> lock(budget_mutex_);
      if (within && ticket == newest_) {
        pending_ = false;
        return;
      }
      if (ticket != newest_ || now_ns() >= deadline) {
        const std::size_t page = mapper->space.page_size;
        throw BudgetInUse(mapper->numbers().created * page, pages * page, static_cast<double>(now_ns() - since) / 1e9);
      }
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(std::min(1 + round / 8, 5U)));
    if (round % 8 == 0) pause();
  }
}

std::size_t Device::trim() {
  const std::size_t before = mapper->numbers().pages[static_cast<std::size_t>(Owner::kActivations)];
  heap.trim_and_wait();
  const std::size_t after = mapper->numbers().pages[static_cast<std::size_t>(Owner::kActivations)];
  mapper->release_free();
  return (before > after ? before - after : 0) * mapper->space.page_size;
}

void Device::close() {
  if (closed_) return;
  const std::size_t live = heap.close();
  if (live > 0)
    throw UsageError(format("%zu blocks are still in use: drop the tensors that were made under ballonet first", live));
  mapper->shutdown();
  mapper->stop_background();
  closed_ = true;
}

std::pair<Mapper::Numbers, Heap::Numbers> Device::numbers() {
  std::lock_guard<std::mutex> lock(heap.mutex);
  return {mapper->numbers(), heap.numbers_locked()};
}

void Device::check() {
  heap.check();
  mapper->check();
  reclaim.check();
}

// The device's memory in torch's words: its statistics, its segments, and what can still be had.
//
// Note [What the numbers mean here]
// allocated  bytes of live blocks, plus the pages of managed weights and KV caches
// reserved   every page that exists, whoever owns it, free ones included
// segment    a page
// The peak of allocated bytes is that of the blocks plus the pages there are now, but no more than the peak of what
// existed. Historical totals are kept for the blocks; elsewhere they repeat the current value. Blocks below 1 MiB,
// or half a page where that is less, are torch's small pool; all else, ranges too, is its large one.

namespace {

BallonetFigure figure(std::uint64_t current, std::uint64_t peak, std::uint64_t allocated, std::uint64_t freed) {
  return {static_cast<std::int64_t>(current), static_cast<std::int64_t>(std::max(current, peak)),
          static_cast<std::int64_t>(allocated), static_cast<std::int64_t>(freed)};
}

// A level with pages of ranges on top, and with its totals since they were reset.
BallonetFigure figure(const Level& level, const Level& since, std::uint64_t pages, std::uint64_t existed) {
  return figure(level.current + pages, std::min(level.peak + pages, existed), level.added - since.added,
                level.removed - since.removed);
}

BallonetFigure held(std::uint64_t current, std::uint64_t peak) { return figure(current, peak, current, 0); }

}  // namespace

BallonetStats Device::stats() {
  const auto [mapper_numbers, heap_numbers] = numbers();
  const std::uint64_t page = mapper->space.page_size;
  const auto& owned = mapper_numbers.pages;
  const std::uint64_t ranges =
      (owned[static_cast<std::size_t>(Owner::kWeights)] + owned[static_cast<std::size_t>(Owner::kKv)]) * page;
  const std::uint64_t exists = mapper_numbers.created * page, existed = mapper_numbers.created_peak * page;
  const Level& small = heap_numbers.usage[BALLONET_SMALL].mapped;
  std::lock_guard<std::mutex> lock(since_mutex_);
  BallonetStats stats{};
  for (int kind = 0; kind < BALLONET_CLASSES; ++kind) {
    const Usage &now = heap_numbers.usage[kind], &since = since_.usage[kind];
    const std::uint64_t pages = kind == BALLONET_SMALL ? 0 : ranges, most = std::max(existed, now.bytes.peak);
    stats.allocation[kind] = figure(now.blocks, since.blocks, 0, now.blocks.peak);
    stats.active[kind] = figure(now.active_blocks, since.active_blocks, 0, now.active_blocks.peak);
    stats.allocated_bytes[kind] = figure(now.bytes, since.bytes, pages, most);
    stats.active_bytes[kind] = figure(now.active_bytes, since.active_bytes, pages, most);
    stats.requested_bytes[kind] = figure(now.requested, since.requested, pages, most);
    const std::uint64_t reserved = kind == BALLONET_ALL     ? exists
                                   : kind == BALLONET_SMALL ? small.current
                                                            : exists - std::min(exists, small.current);
    const std::uint64_t peak = kind == BALLONET_SMALL ? small.peak : std::max(existed, exists);
    stats.reserved_bytes[kind] = held(reserved, peak);
    stats.segment[kind] = held(reserved / page, peak / page);
    const std::uint64_t idle = now.mapped.current - std::min(now.mapped.current, now.active_bytes.current);
    stats.inactive_split_bytes[kind] = held(idle, idle);
  }
  const auto calls = driver_calls();
  const auto made = [&](Fn function) { return calls[static_cast<unsigned>(function)]; };
  stats.num_alloc_retries = static_cast<std::int64_t>(heap_numbers.retries - since_.retries);
  stats.num_ooms = static_cast<std::int64_t>(heap_numbers.refusals - since_.refusals);
  stats.num_sync_all_streams = static_cast<std::int64_t>(heap_numbers.waits - since_.waits);
  stats.num_device_alloc = static_cast<std::int64_t>(made(Fn::cuMemCreate) - created_since_);
  stats.num_device_free = static_cast<std::int64_t>(made(Fn::cuMemRelease) - released_since_);
  return stats;
}

void Device::reset_peaks() {
  heap.reset_peaks();
  mapper->reset_peak();
}

void Device::reset_accumulated() {
  const Heap::Numbers now = numbers().second;
  const auto calls = driver_calls();
  std::lock_guard<std::mutex> lock(since_mutex_);
  since_ = now;
  created_since_ = calls[static_cast<unsigned>(Fn::cuMemCreate)];
  released_since_ = calls[static_cast<unsigned>(Fn::cuMemRelease)];
}

// Stock says what the device has left. Here the budget is the smaller limit, and a free page of the pool is as good as
// a free one of the device, which memory in torch's own cache is not.
std::pair<std::size_t, std::size_t> Device::memory_info() {
  const auto [free, total] = mapper->free_memory();
  const Mapper::Numbers now = mapper->numbers();
  const std::size_t page = mapper->space.page_size;
  const std::size_t more = std::min(free / page, now.budget - std::min(now.budget, now.created));
  return {(now.pages[static_cast<std::size_t>(Owner::kFree)] + more) * page, total};
}

std::vector<Segment> Device::segments() {
  std::unique_lock<std::mutex> lock(heap.mutex);
  std::vector<Segment> result = heap.snapshot.segments_locked();
  const AddressSpace::DevicePages pages = mapper->space.device_pages();
  lock.unlock();
  const auto add = [&](std::uint64_t address, std::uint64_t size, Owner owner) {
    const bool used = owner == Owner::kWeights || owner == Owner::kKv;
    const BallonetBlock block{address, size, used ? size : 0, nullptr, {}, used, used, false};
    result.push_back({{address, size, nullptr, {}, false, nullptr, 0}, {block}, owner, Place::kDevice});
  };
  for (const AddressSpace::Owned& run : pages.runs) add(run.address, run.size, run.owner);
  // What no address leads to for good lies where no pointer does: from 0 on, the free pages first.
  std::uint64_t address = 0;
  for (const Owner owner : {Owner::kFree, Owner::kRetiring}) {
    const std::uint64_t size = pages.counts[static_cast<std::size_t>(owner)] * mapper->space.page_size;
    if (size > 0) add(address, size, owner);
    address += size;
  }
  return result;
}

}  // namespace ballonet
