#include "heap/arenas.h"

#include <algorithm>

#include "base/tuning.h"

namespace ballonet {

Arena::Arena(Heap& heap, const ArenaKey& key_, std::shared_ptr<Range> range_, std::uint64_t page)
    : key(key_), range(std::move(range_)), blocks(range->pieces * page, page) {
  HeapAddresses::all().add(range->base, range->base + range->pieces * page, &heap);
}

Arena::~Arena() {
  HeapAddresses::all().remove(range->base);
  range->mapper->close(*range, key.pooled());  // graphs are replayed on any stream
}

Arenas::List& Arenas::look_up(const ArenaKey& key) {
  const auto [found, fresh] = arenas_.try_emplace(key);
  if (fresh) mapper_.fences.note_stream(key.stream);
  const unsigned hot = key.small ? 1 : 0;
  hot_key_[hot] = key;
  hot_[hot] = &found->second;
  return found->second;
}

// Addresses for twice what the device has: a block must find a place whatever lies around it. Some virtual GPUs refuse
// large reservations, so smaller ones are tried before giving up.
Arena& Arenas::add(List& arenas, const ArenaKey& key, std::uint64_t size) {
  const std::uint64_t page = mapper_.space.page_size, least = (size + page - 1) / page + 1;
  for (std::uint64_t pieces = std::max(least, 2 * mapper_.space.context.total_memory / page);;
       pieces = std::max(least, pieces / 4)) {
    try {
      auto range = mapper_.reserve(pieces, Owner::kActivations, nullptr);
      return *arenas.emplace_back(std::make_unique<Arena>(heap_, key, std::move(range), page));
    } catch (const DriverError&) {
      if (pieces == least) throw;
    }
  }
}

std::vector<Arena*> Arenas::all() const {
  std::vector<Arena*> result;
  for (const auto& [key, arenas] : arenas_) {
    for (const auto& arena : arenas) result.push_back(arena.get());
  }
  return result;
}

std::vector<Arena*> Arenas::of_pool(BallonetPool pool) const {
  std::vector<Arena*> result = all();
  result.erase(std::remove_if(result.begin(), result.end(), [&](Arena* arena) { return arena->key.pool != pool; }),
               result.end());
  return result;
}

Arena* Arenas::at(BallonetPool pool, std::uint64_t address) const {
  for (Arena* arena : of_pool(pool)) {
    if (address - arena->range->base < arena->range->pieces * mapper_.space.page_size) return arena;
  }
  return nullptr;
}

// Smaller blocks are copied faster than they are told.
void Arenas::tell_idle() const {
  for (const Arena* arena : all()) {
    for (const Blocks::Block* block = arena->blocks.first(); block != nullptr; block = block->after) {
      if (block->state == Blocks::State::kFree && block->size >= tuning::kIdleTold)
        mapper_.space.driver.idle_at_fork(arena->address(block), block->size);
    }
  }
}

std::pair<std::size_t, std::uint64_t> Arenas::check() const {
  const std::uint64_t page = mapper_.space.page_size;
  std::size_t live = 0;
  std::uint64_t bytes = 0;
  for (const Arena* arena : all()) {
    arena->blocks.check();
    std::size_t backed = 0;  // pieces before this one are known to be backed
    for (const Blocks::Block* block = arena->blocks.first(); block != nullptr; block = block->after) {
      if (block->state == Blocks::State::kLive) ++live, bytes += block->size;
      if (block->state == Blocks::State::kHole) continue;
      const std::size_t last = (block->offset + block->size + page - 1) / page;
      for (std::size_t i = std::max<std::size_t>(backed, block->offset / page); i < last; ++i) {
        if (arena->range->leads_to(i) != own_page_in(arena->key.place))
          throw InvariantBroken(format("piece %zu lies under a block and is not backed", i));
        backed = i + 1;
      }
    }
  }
  return {live, bytes};
}

}  // namespace ballonet
