// Pools of CUDA graphs and of torch.cuda.MemPool.
//
// Note [Checkpoints]
// Replaying a graph allocates nothing, so that after a replay the heap does not know which of the graph's outputs live.
// Before another graph is captured into the same pool, torch puts the pool back into the state in which it was when the
// graph's own capture ended: what lives in it now is freed, and what lived then is handed out at the same addresses.
// (inductor's graph trees, torch.compile with mode="reduce-overhead".) The pages are still there: a pool keeps them for
// as long as it has users.
#include <algorithm>

#include "heap.h"

namespace ballonet {

void Heap::begin_pool(MempoolId pool, StreamFilter filter) {
  std::lock_guard<std::mutex> lock(mutex);
  for (const auto& entry : filling_) {
    if (entry.first == pool)
      throw UsageError("this memory pool is being filled already: end the other capture or use_mem_pool first");
  }
  filling_.emplace_back(pool, std::move(filter));
  ++pools_[pool].users;
  mapper_->fences.captures_may_begin();
}

void Heap::end_pool(MempoolId pool) {
  std::lock_guard<std::mutex> lock(mutex);
  const std::size_t before = filling_.size();
  filling_.erase(
      std::remove_if(filling_.begin(), filling_.end(), [&](const auto& entry) { return entry.first == pool; }),
      filling_.end());
  mapper_->fences.captures_are_over(before - filling_.size());
}

void Heap::hold_pool(MempoolId pool) {
  std::lock_guard<std::mutex> lock(mutex);
  ++pools_[pool].users;
}

void Heap::release_pool(MempoolId pool) {
  std::lock_guard<std::mutex> lock(mutex);
  const auto found = pools_.find(pool);
  if (found == pools_.end() || --found->second.users > 0) return;
  pools_.erase(found);
  drop_released();
}

unsigned Heap::pool_users(MempoolId pool) {
  std::lock_guard<std::mutex> lock(mutex);
  const auto found = pools_.find(pool);
  return found == pools_.end() ? 0 : found->second.users;
}

void Heap::set_use_on_oom(MempoolId pool, bool use) {
  std::lock_guard<std::mutex> lock(mutex);
  if (const auto found = pools_.find(pool); found != pools_.end()) found->second.use_on_oom = use;
}

// A free block of a pool that lends what it caches when memory runs out, or nullptr.
Blocks::Block* Heap::fallback(const Key& key, std::uint64_t size, Arena*& arena) {
  for (const auto& [pool, pooled] : pools_) {
    if (!pooled.use_on_oom || pool == key.pool) continue;
    const auto arenas = arenas_.find(Key{key.stream, pool, key.small});
    if (arenas == arenas_.end()) continue;
    if (Blocks::Block* block = best_fit(arenas->second, size, arena)) return block;
  }
  return nullptr;
}

Heap::Checkpoint Heap::checkpoint(MempoolId pool) {
  std::lock_guard<std::mutex> lock(mutex);
  if (pools_.count(pool) == 0) throw UsageError("there is no memory pool of this id");
  Checkpoint state{pool, {}};
  for (const auto& [key, arenas] : arenas_) {
    if (!(key.pool == pool)) continue;
    for (const auto& arena : arenas) {
      for (const Blocks::Block* block = arena->blocks.first(); block != nullptr; block = block->after) {
        const std::uint64_t address = arena->range->base + block->offset;
        if (block->state == Blocks::State::kLive && live_.find(address) == block)
          state.blocks.push_back({address, block->size, block->requested});
      }
    }
  }
  return state;
}

Heap::Arena* Heap::arena_at(MempoolId pool, std::uint64_t address) {
  for (const auto& [key, arenas] : arenas_) {
    if (!(key.pool == pool)) continue;
    for (const auto& arena : arenas) {
      if (address - arena->range->base < arena->range->pieces * page_) return arena.get();
    }
  }
  return nullptr;
}

Heap::Restored Heap::restore(const Checkpoint& state) {
  Lock lock(mutex);
  if (!mapper_->fences.capturing()) settle_waiting(lock);
  for (const auto& live : state.blocks) {
    if (arena_at(state.pool, live.address) == nullptr)
      throw UsageError("the memory pool of this checkpoint was released meanwhile");
  }
  if (std::any_of(waiting_.begin(), waiting_.end(), [&](const Waiting& waiting) {
        return static_cast<Arena*>(waiting.block->tag)->key.pool == state.pool;
      })) {
    throw UsageError("memory of this pool is still used on another stream: end the capture, or synchronize, first");
  }
  Restored restored;
  for (auto& [key, arenas] : arenas_) {
    if (!(key.pool == state.pool)) continue;
    for (auto& arena : arenas) {
      std::vector<Blocks::Block*> live;  // first: a block that is freed joins its neighbours
      for (Blocks::Block* block = arena->blocks.first(); block != nullptr; block = block->after) {
        if (block->state == Blocks::State::kLive) live.push_back(block);
      }
      for (Blocks::Block* block : live) {
        const std::uint64_t address = arena->range->base + block->offset;
        live_.erase(address);
        restored.freed.push_back(reinterpret_cast<void*>(address));
        // Whoever restores says that nobody uses it any more: a stream that was recorded on it included.
        users_.erase(block);
        block->shared = false;
        take_back(block);
      }
    }
  }
  for (const auto& live : state.blocks) {
    Arena& arena = *arena_at(state.pool, live.address);
    const std::uint64_t offset = live.address - arena.range->base;
    Blocks::Block* block = arena.blocks.first();
    while (block->offset + block->size <= offset) block = block->after;
    if (block->state != Blocks::State::kFree || block->offset + block->size < offset + live.size)
      throw InvariantBroken("a memory pool that is in use lost pages");
    restored.created.push_back(hand_out(arena, arena.blocks.carve(block, offset, live.size), live.requested));
  }
  return restored;
}

}  // namespace ballonet
