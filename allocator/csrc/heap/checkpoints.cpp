#include "heap/checkpoints.h"

namespace ballonet {

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

}  // namespace ballonet
