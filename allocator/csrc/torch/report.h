// The core's numbers, segments and blocks in torch's types.
//
// Lock: none; it reads copies.
#pragma once

#include <c10/cuda/CUDACachingAllocator.h>

#include <cstdint>
#include <map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "entry.h"
#include "history.h"

namespace ballonet_torch {

inline c10::CachingAllocator::Stat stat(const BallonetFigure& figure) {
  c10::CachingAllocator::Stat result;
  result.current = figure.current;
  result.peak = figure.peak;
  result.allocated = figure.allocated;
  result.freed = figure.freed;
  return result;
}

inline c10::CachingAllocator::StatArray stats_of(const BallonetFigure (&figures)[BALLONET_CLASSES]) {
  static_assert(static_cast<int>(c10::CachingAllocator::StatType::AGGREGATE) == BALLONET_ALL);
  static_assert(static_cast<int>(c10::CachingAllocator::StatType::SMALL_POOL) == BALLONET_SMALL);
  static_assert(static_cast<int>(c10::CachingAllocator::StatType::LARGE_POOL) == BALLONET_LARGE);
  c10::CachingAllocator::StatArray result;
  for (int kind = 0; kind < BALLONET_CLASSES; ++kind) result[static_cast<std::size_t>(kind)] = stat(figures[kind]);
  return result;
}

inline c10::CachingDeviceAllocator::DeviceStats device_stats(const BallonetStats& from) {
  c10::CachingDeviceAllocator::DeviceStats result;
  result.allocation = stats_of(from.allocation);
  result.segment = stats_of(from.segment);
  result.active = stats_of(from.active);
  result.inactive_split = stats_of(from.inactive_split);
  result.allocated_bytes = stats_of(from.allocated_bytes);
  result.reserved_bytes = stats_of(from.reserved_bytes);
  result.active_bytes = stats_of(from.active_bytes);
  result.inactive_split_bytes = stats_of(from.inactive_split_bytes);
  result.requested_bytes = stats_of(from.requested_bytes);
  result.num_alloc_retries = from.num_alloc_retries;
  result.num_ooms = from.num_ooms;
  result.num_sync_all_streams = from.num_sync_all_streams;
  result.num_device_alloc = from.num_device_alloc;
  result.num_device_free = from.num_device_free;
  result.max_split_size = -1;
  return result;
}

struct Segment {
  std::uint64_t address, size;
  void* stream;
  c10::MempoolId_t pool;
  bool small;
  std::vector<BallonetBlock> blocks;
};

inline std::vector<Segment> segments(const BallonetCore& core, int device) {
  std::vector<Segment> result;
  core.segments(device, &result, [](void* to, const BallonetSegment* from) {
    static_cast<std::vector<Segment>*>(to)->push_back(
        {from->address, from->size, from->stream, from->pool, from->small, {from->blocks, from->blocks + from->count}});
  });
  return result;
}

inline c10::CachingDeviceAllocator::SegmentInfo segment_info(const Segment& from, int device, const History& history) {
  c10::CachingDeviceAllocator::SegmentInfo result;
  result.device = static_cast<c10::DeviceIndex>(device);
  result.address = from.address;
  result.total_size = from.size;
  result.stream = from.stream;
  result.is_large = !from.small;
  result.is_expandable = true;
  result.owner_private_pool_id = from.pool;
  for (const BallonetBlock& block : from.blocks) {
    c10::CachingDeviceAllocator::BlockInfo& info = result.blocks.emplace_back();
    info.size = block.size;
    info.requested_size = block.requested;
    info.allocated = block.allocated;
    info.active = block.active;
    if (block.allocated) info.context_when_allocated = history.context_of(block.address);
    if (block.allocated) result.allocated_size += block.size;
    if (block.active) result.active_size += block.size;
    if (block.active) result.requested_size += block.requested;
  }
  return result;
}

inline std::vector<c10::cuda::CUDACachingAllocator::StreamSegmentSize> segment_sizes(const std::vector<Segment>& all) {
  std::map<std::pair<void*, bool>, std::size_t> sizes;
  for (const Segment& segment : all) sizes[{segment.stream, segment.small}] += segment.size;
  std::vector<c10::cuda::CUDACachingAllocator::StreamSegmentSize> result;
  for (const auto& [key, size] : sizes) result.emplace_back(static_cast<cudaStream_t>(key.first), key.second, size);
  return result;
}

inline std::unordered_set<void*> live_blocks(const std::vector<Segment>& all, c10::MempoolId_t pool) {
  std::unordered_set<void*> result;
  for (const Segment& segment : all) {
    for (const BallonetBlock& block : segment.blocks) {
      if (segment.pool == pool && block.allocated) result.insert(reinterpret_cast<void*>(block.address));
    }
  }
  return result;
}

// Adds the entry of torch.cuda.memory._annotate_memory, where this torch has one.
template <class Entry>
auto annotate(History& history, const BallonetBlock& block, c10::DeviceIndex device, const std::string& metadata)
    -> decltype(Entry::ANNOTATE, void()) {
  history.add(Entry::ANNOTATE, block.address, block.requested, block.stream, block.pool, device,
              history.context_of(block.address), metadata);
}
template <class Entry, class... Unused>
void annotate(History&, const BallonetBlock&, c10::DeviceIndex, const std::string&, Unused...) {}

}  // namespace ballonet_torch
