// What torch's memory snapshot and its history are told of the heap.
#include <algorithm>

#include "heap.h"

namespace ballonet {

// A segment is a stretch of blocks with no hole between them.
std::vector<Heap::Segment> Heap::segments() {
  std::lock_guard<std::mutex> lock(mutex);
  std::vector<Segment> result;
  for (const auto& [key, arenas] : arenas_) {
    for (const auto& arena : arenas) {
      bool open = false;  // does the newest segment go on?
      for (const Blocks::Block* block = arena->blocks.first(); block != nullptr; block = block->after) {
        const std::uint64_t address = arena->range->base + block->offset;
        const bool hole = block->state == Blocks::State::kHole, active = block->state == Blocks::State::kLive;
        if (!hole && !open) result.push_back({{address, 0, key.stream, key.pool.pair(), key.small, nullptr, 0}, {}});
        open = !hole;
        if (hole) continue;
        const bool allocated = active && live_.find(address) == block;
        result.back().facts.size += block->size;
        result.back().blocks.push_back({address, block->size, active ? block->requested : 0, key.stream,
                                        key.pool.pair(), allocated, active, block->shared});
      }
    }
  }
  std::sort(result.begin(), result.end(),
            [](const Segment& one, const Segment& other) { return one.facts.address < other.facts.address; });
  return result;
}

bool Heap::find(const void* address, BallonetBlock& out) {
  std::lock_guard<std::mutex> lock(mutex);
  const auto at = reinterpret_cast<std::uint64_t>(address);
  const Blocks::Block* block = live_.find(at);
  if (block == nullptr) return false;
  const Key& key = static_cast<const Arena*>(block->tag)->key;
  out = {at, block->size, block->requested, key.stream, key.pool.pair(), true, true, block->shared};
  return true;
}

std::uint64_t Heap::largest_free() {
  std::uint64_t largest = 0;
  for (const Segment& segment : segments()) {
    for (const BallonetBlock& block : segment.blocks) {
      if (!block.active) largest = std::max(largest, block.size);
    }
  }
  return largest;
}

void Heap::observe(const BallonetObserver* observer) {
  std::lock_guard<std::mutex> lock(mutex);
  observer_ = observer;
}

void Heap::tell_mapped(const Arena& arena, const Span& span) {
  const std::uint64_t size = span.count * page_;
  if (arena.key.place == Place::kDevice) usage_.mapped(arena.key.small, size);
  if (observer_ != nullptr)
    observer_->mapped(arena.range->base + span.first * page_, size, arena.key.stream, arena.key.pool.pair());
}

void Heap::tell_unmapped(const Arena& arena, const Span& span) {
  const std::uint64_t size = span.count * page_;
  if (arena.key.place == Place::kDevice) usage_.unmapped(arena.key.small, size);
  if (observer_ != nullptr)
    observer_->unmapped(arena.range->base + span.first * page_, size, arena.key.stream, arena.key.pool.pair());
}

// Tells the observer that all of an arena is unmapped, which is about to go. Pre: nothing of it is live.
void Heap::tell_all_unmapped(const Arena& arena) {
  for (const Blocks::Block* block = arena.blocks.first(); block != nullptr; block = block->after) {
    if (block->state == Blocks::State::kFree) tell_unmapped(arena, {block->offset / page_, block->size / page_});
  }
}

}  // namespace ballonet
