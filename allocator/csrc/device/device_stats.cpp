// The device's memory in torch's words: its statistics, its segments, and what can still be had.
//
// Note [What the numbers mean here]
// allocated  bytes of live blocks, plus the pages of managed weights and KV caches
// reserved   every page that exists, whoever owns it, free ones included
// segment    a page
// The peak of allocated bytes is that of the blocks plus the pages there are now, but no more than the peak of what
// existed. Historical totals are kept for the blocks; elsewhere they repeat the current value. Blocks below 1 MiB,
// or half a page where that is less, are torch's small pool; all else, ranges too, is its large one.
#include <algorithm>

#include "device/device.h"

namespace ballonet {
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
