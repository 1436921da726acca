#include "heap/heap_snapshot.h"

#include <algorithm>

namespace ballonet {

std::vector<Segment> HeapSnapshot::segments() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return segments_locked();
}

std::vector<Segment> HeapSnapshot::segments_locked() const {
  std::vector<Segment> result;
  for (const Arena* arena : arenas_.all()) {
    const ArenaKey& key = arena->key;
    bool open = false;  // does the newest segment go on?
    for (const Blocks::Block* block = arena->blocks.first(); block != nullptr; block = block->after) {
      const std::uint64_t address = arena->address(block);
      const bool hole = block->state == Blocks::State::kHole, active = block->state == Blocks::State::kLive;
      if (!hole && !open)
        result.push_back(
            {{address, 0, key.stream, key.pool, key.small, nullptr, 0}, {}, Owner::kActivations, key.place});
      open = !hole;
      if (hole) continue;
      const bool allocated = active && live_.at(address) == block;
      result.back().facts.size += block->size;
      result.back().blocks.push_back({address, block->size, active ? block->requested : 0, key.stream, key.pool,
                                      allocated, active, block->shared});
    }
  }
  std::sort(result.begin(), result.end(),
            [](const Segment& one, const Segment& other) { return one.facts.address < other.facts.address; });
  return result;
}

bool HeapSnapshot::find(const void* address, BallonetBlock& out) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto at = reinterpret_cast<std::uint64_t>(address);
  const Blocks::Block* block = live_.at(at);
  if (block == nullptr) return false;
  const ArenaKey& key = Arena::of(block).key;
  out = {at, block->size, block->requested, key.stream, key.pool, true, true, block->shared};
  return true;
}

std::uint64_t HeapSnapshot::largest_free() const {
  std::uint64_t largest = 0;
  for (const Segment& segment : segments()) {
    for (const BallonetBlock& block : segment.blocks) {
      if (!block.active) largest = std::max(largest, block.size);
    }
  }
  return largest;
}

}  // namespace ballonet
