#include "heap/heap_pages.h"

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

// Bytes that may exist for activations before idle pages are moved rather than new ones made.
std::uint64_t HeapPages::allowance() const {
  const std::uint64_t peak = report_.usage.requested_peak();
  return peak + peak / 64 + 3 * page_;
}

std::size_t HeapPages::ours(const Mapper::Numbers& numbers) {
  const auto pages = [&](Owner owner) { return numbers.pages[static_cast<std::size_t>(owner)]; };
  return numbers.created - pages(Owner::kWeights) - pages(Owner::kKv);
}

bool HeapPages::may_outgrow(const Blocks::Placement& placement) const {
  const std::size_t count = (placement.to - placement.from) / page_;
  return (ours(mapper_.numbers()) + count) * page_ <= 2 * allowance();
}

bool HeapPages::back(Arena& arena, const Blocks::Placement& placement, bool may_harvest) {
  const std::size_t count = (placement.to - placement.from) / page_;
  const std::int64_t since = now_ns();
  if (arena.key.place == Place::kHost) {
    map(arena, placement);
    mapper_.events.add(Events::Kind::kSpill, count, since);
    return true;
  }
  auto numbers = mapper_.numbers();
  const auto pages = [&](Owner owner) { return numbers.pages[static_cast<std::size_t>(owner)]; };
  if (pages(Owner::kFree) < count + numbers.ahead && pages(Owner::kRetiring) > 0) {
    mapper_.reap(false);
    numbers = mapper_.numbers();
  }
  const std::size_t idle = pages(Owner::kFree) - numbers.ahead;
  const std::size_t growth = count > idle ? count - idle : 0;
  if (may_harvest && growth > 0 && (ours(numbers) + growth) * page_ > allowance() && !mapper_.fences.capturing()) {
    // The block behind the hole may grow the hole when it gives pages; the one before it would take the hole's place.
    const bool to_the_end = placement.to == placement.hole->offset + placement.hole->size;
    if (harvest(growth, placement.hole->before, to_the_end ? placement.hole->after : nullptr) > 0) return false;
  }
  map(arena, placement);
  if (const std::size_t deflated = std::min(idle, count)) mapper_.events.add(Events::Kind::kDeflate, deflated, since);
  return true;
}

void HeapPages::map(Arena& arena, const Blocks::Placement& placement) {
  const Span span{placement.from / page_, (placement.to - placement.from) / page_};
  if (arena.key.place == Place::kDevice) given_ = 0;
  mapper_.map(*arena.range, span.first, span.count, arena.key.place, false);
  report_.mapped(arena, span);
  arena.blocks.fill(placement.hole, placement.from, placement.to);
}

// Small blocks go first: they are the least likely to serve where they lie, and recorded traces replay with half as
// many moves as the other way round.
std::size_t HeapPages::harvest(std::size_t pages, const Blocks::Block* keep_before, const Blocks::Block* keep_after) {
  std::size_t taken = 0;
  for (Arena* arena : arenas_.all()) {
    if (!harvestable(*arena)) continue;
    Spans spans;
    arena->blocks.visit_large([&](Blocks::Block* block) {
      auto [begin, end] = arena->blocks.inner(block);
      if (block == keep_before || block == keep_after || begin >= end) return true;
      end = begin + std::min<std::uint64_t>((end - begin) / page_, pages - taken) * page_;
      spans.push_back({begin / page_, (end - begin) / page_});
      taken += spans.back().count;
      arena->blocks.punch(block, begin, end);
      return taken < pages;
    });
    if (!spans.empty()) mapper_.retire(*arena->range, spans);
    for (const Span& span : spans) report_.unmapped(*arena, span);
    if (taken >= pages) break;
  }
  return taken;
}

std::size_t HeapPages::worth_giving(std::size_t lacking) {
  given_ = std::min(std::max({lacking, 2 * given_, std::size_t{1}}), mapper_.numbers().created);
  return given_;
}

void HeapPages::harvest_excess(bool retiring) {
  const auto numbers = mapper_.numbers();
  const Owner owner = retiring ? Owner::kRetiring : Owner::kFree;
  const std::size_t leaving = numbers.budget + numbers.pages[static_cast<std::size_t>(owner)];
  if (numbers.created > leaving) harvest(numbers.created - leaving);
}

std::size_t HeapPages::idle() const {
  std::size_t pages = 0;
  for (Arena* arena : arenas_.all()) {
    if (!harvestable(*arena)) continue;
    arena->blocks.visit_large([&](Blocks::Block* block) {
      const auto [begin, end] = arena->blocks.inner(block);
      if (begin < end) pages += (end - begin) / page_;
      return true;
    });
  }
  return pages;
}

void HeapPages::give_up_host(Arena& arena, Blocks::Block* free) {
  const auto [begin, end] = arena.blocks.inner(free);
  if (begin >= end) return;
  const Span span{begin / page_, (end - begin) / page_};
  arena.blocks.punch(free, begin, end);
  mapper_.retire(*arena.range, {span});
  report_.unmapped(arena, span);
  mapper_.events.add(Events::Kind::kUnspill, span.count);
}

}  // namespace ballonet
