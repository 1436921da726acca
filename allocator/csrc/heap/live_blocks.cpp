#include "heap/live_blocks.h"

#include <algorithm>

namespace ballonet {

void* LiveBlocks::free_now(Arena& arena, Blocks::Block* block) {
  const std::uint64_t address = arena.address(block);
  users_.erase(block);
  block->shared = false;
  give_back(address);
  return reinterpret_cast<void*>(address);
}

void LiveBlocks::wait_for_streams(Blocks::Block* block) {
  const auto users = users_.find(block);
  waiting_.push_back({mapper_.fences.over(users->second), block});
  users_.erase(users);
}

void LiveBlocks::use_on(Blocks::Block* block, CUstream stream) {
  std::vector<CUstream>& users = users_[block];
  if (std::find(users.begin(), users.end(), stream) != users.end()) return;
  users.push_back(stream);
  block->shared = true;
  mapper_.fences.note_stream(stream);
}

void LiveBlocks::free_passed() {
  while (!waiting_.empty() && mapper_.fences.passed(waiting_.front().fence)) {
    Blocks::Block* block = waiting_.front().block;
    waiting_.pop_front();
    release(block);
  }
}

void LiveBlocks::wait_freed(HeapLock& lock) {
  std::vector<Awaited> all;
  for (Waiting& waiting : waiting_) all.push_back(mapper_.fences.awaited(waiting.fence));
  {
    Unlocked unlocked(lock);
    for (const Awaited& each : all) mapper_.fences.wait(each);
  }
  free_passed();
  pools_.drop_released();
}

bool LiveBlocks::any_waits(BallonetPool pool) const {
  return std::any_of(waiting_.begin(), waiting_.end(),
                     [&](const Waiting& waiting) { return Arena::of(waiting.block).key.pool == pool; });
}

void LiveBlocks::check(std::size_t blocks, std::uint64_t bytes) const {
  for (const Waiting& waiting : waiting_) bytes -= waiting.block->size;
  if (blocks != size() || bytes != report_.usage.live_bytes())
    throw InvariantBroken("live blocks and their addresses do not add up");
}

Checkpoint Checkpoints::take(BallonetPool pool) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!pools_.held(pool)) throw UsageError("there is no memory pool of this id");
  Checkpoint state{pool, {}};
  for (const Arena* arena : arenas_.of_pool(pool)) {
    for (const Blocks::Block* block = arena->blocks.first(); block != nullptr; block = block->after) {
      const std::uint64_t address = arena->address(block);
      if (block->state == Blocks::State::kLive && live_.at(address) == block)
        state.blocks.push_back({address, block->size, block->requested});
    }
  }
  return state;
}

Checkpoints::Restored Checkpoints::restore(const Checkpoint& state) {
  HeapLock lock(mutex_);
  if (!mapper_.fences.capturing()) live_.wait_freed(lock);
  for (const auto& live : state.blocks) {
    if (arenas_.at(state.pool, live.address) == nullptr)
      throw UsageError("the memory pool of this checkpoint was released meanwhile");
  }
  if (live_.any_waits(state.pool))
    throw UsageError("memory of this pool is still used on another stream: end the capture, or synchronize, first");
  Restored restored;
  for (Arena* arena : arenas_.of_pool(state.pool)) {
    std::vector<Blocks::Block*> live;  // first: a block that is freed joins its neighbours
    for (Blocks::Block* block = arena->blocks.first(); block != nullptr; block = block->after) {
      if (block->state == Blocks::State::kLive) live.push_back(block);
    }
    // The caller guarantees that no stream uses them any more, not even one recorded with record_stream.
    for (Blocks::Block* block : live) restored.freed.push_back(live_.free_now(*arena, block));
  }
  for (const auto& live : state.blocks) {
    Arena& arena = *arenas_.at(state.pool, live.address);
    const std::uint64_t offset = live.address - arena.range->base;
    Blocks::Block* block = arena.blocks.first();
    while (block->offset + block->size <= offset) block = block->after;
    if (block->state != Blocks::State::kFree || block->offset + block->size < offset + live.size)
      throw InvariantBroken("a memory pool that is in use lost pages");
    restored.created.push_back(live_.hand_out(arena, arena.blocks.carve(block, offset, live.size), live.requested));
  }
  return restored;
}

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
