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

}  // namespace ballonet
