#include "heap/private_pools.h"

#include <algorithm>

namespace ballonet {

void PrivatePools::begin(BallonetPool pool, StreamFilter filter) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& entry : filling_) {
    if (entry.first == pool)
      throw UsageError("this memory pool is being filled already: end the other capture or use_mem_pool first");
  }
  filling_.emplace_back(pool, std::move(filter));
  ++pools_[pool].users;
  mapper_.fences.captures_may_begin();
}

void PrivatePools::end(BallonetPool pool) {
  std::lock_guard<std::mutex> lock(mutex_);
  const std::size_t before = filling_.size();
  filling_.erase(
      std::remove_if(filling_.begin(), filling_.end(), [&](const auto& entry) { return entry.first == pool; }),
      filling_.end());
  mapper_.fences.captures_are_over(before - filling_.size());
}

void PrivatePools::hold(BallonetPool pool) {
  std::lock_guard<std::mutex> lock(mutex_);
  ++pools_[pool].users;
}

void PrivatePools::release(BallonetPool pool) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = pools_.find(pool);
  if (found == pools_.end() || --found->second.users > 0) return;
  pools_.erase(found);
  drop_released();
}

unsigned PrivatePools::users(BallonetPool pool) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = pools_.find(pool);
  return found == pools_.end() ? 0 : found->second.users;
}

void PrivatePools::set_use_on_oom(BallonetPool pool, bool use) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (const auto found = pools_.find(pool); found != pools_.end()) found->second.use_on_oom = use;
}

BallonetPool PrivatePools::filled_by(CUstream stream) const {
  for (const auto& [pool, filter] : filling_) {
    if (filter(stream)) return pool;
  }
  return {};
}

Blocks::Block* PrivatePools::lent(const ArenaKey& key, std::uint64_t size, Arena*& arena) {
  for (const auto& [pool, pooled] : pools_) {
    if (!pooled.use_on_oom || pool == key.pool) continue;
    if (Arenas::List* arenas = arenas_.find({key.stream, pool, key.small})) {
      if (Blocks::Block* block = Arenas::best_fit(*arenas, size, arena)) return block;
    }
  }
  return nullptr;
}

void PrivatePools::drop_released() {
  arenas_.drop([&](const ArenaKey& key, const Arenas::List& arenas) {
    if (!key.pooled() || held(key.pool)) return false;
    if (!std::all_of(arenas.begin(), arenas.end(), [](const auto& arena) { return arena->blocks.empty(); }))
      return false;
    for (const auto& arena : arenas) report_.unmapped(*arena);
    return true;
  });
}

}  // namespace ballonet
