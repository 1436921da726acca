// How pages come to the heap's blocks, and leave them.
#include <algorithm>

#include "heap.h"

namespace ballonet {

// Bytes that may exist for activations before idle pages are moved rather than new ones made.
std::uint64_t Heap::allowance() const { return usage_.requested_peak() + usage_.requested_peak() / 64 + 3 * page_; }

// Backs a hole: with pages that lie idle, then with new ones. Pages are moved only from where they are not beside the
// hole, so that the placement stays true. False where some were, with the hole as it was: they are free once every
// stream has passed.
bool Heap::back(Arena& arena, const Blocks::Placement& placement, bool may_harvest) {
  const std::size_t first = placement.from / page_, count = (placement.to - placement.from) / page_;
  const std::int64_t since = now_ns();
  if (arena.key.place == Place::kHost) {
    mapper_->map(*arena.range, first, count, Place::kHost, false);
    tell_mapped(arena, {first, count});
    arena.blocks.fill(placement.hole, placement.from, placement.to);
    mapper_->events.add(Events::Kind::kSpill, count, since);
    return true;
  }
  auto numbers = mapper_->numbers();
  const auto pages = [&](Owner owner) { return numbers.pages[static_cast<std::size_t>(owner)]; };
  if (pages(Owner::kFree) < count + numbers.ahead && pages(Owner::kRetiring) > 0) {
    mapper_->reap(false);
    numbers = mapper_->numbers();
  }
  const std::size_t idle = pages(Owner::kFree) - numbers.ahead;
  const std::size_t growth = count > idle ? count - idle : 0;
  const std::size_t ours = numbers.created - pages(Owner::kWeights) - pages(Owner::kKv);
  if (may_harvest && growth > 0 && (ours + growth) * page_ > allowance() && !mapper_->fences.capturing()) {
    // The block behind the hole may grow the hole when it gives pages; the one before it would take the hole's place.
    const bool to_the_end = placement.to == placement.hole->offset + placement.hole->size;
    if (harvest(growth, placement.hole->before, to_the_end ? placement.hole->after : nullptr) > 0) return false;
  }
  mapper_->map(*arena.range, first, count, Place::kDevice, false);
  tell_mapped(arena, {first, count});
  arena.blocks.fill(placement.hole, placement.from, placement.to);
  if (const std::size_t deflated = std::min(idle, count)) mapper_->events.add(Events::Kind::kDeflate, deflated, since);
  return true;
}

// A live block becomes free. Host pages that nothing lies on any more go at once.
void Heap::release(Blocks::Block* block) {
  Arena& arena = *static_cast<Arena*>(block->tag);
  if (block->shared) {  // it waited for streams
    usage_.passed(arena.key.small, block->size);
    if (observer_ != nullptr)
      observer_->passed(arena.range->base + block->offset, block->requested, arena.key.stream, arena.key.pool.pair());
  }
  Blocks::Block* free = arena.blocks.release(block);
  if (arena.key.place == Place::kDevice) return;
  const std::uint64_t begin = arena.blocks.inner_begin(free), end = arena.blocks.inner_end(free);
  if (begin >= end) return;
  const Span span{begin / page_, (end - begin) / page_};
  arena.blocks.punch(free, begin, end);
  mapper_->retire(*arena.range, {span});
  tell_unmapped(arena, span);
  mapper_->events.add(Events::Kind::kUnspill, span.count);
}

// While more exists than the budget allows, pages leave as soon as nothing lies on them.
void Heap::give_back() {
  reuse_passed();
  const auto numbers = mapper_->numbers();
  const std::size_t leaving = numbers.budget + numbers.pages[static_cast<std::size_t>(Owner::kRetiring)];
  if (numbers.created > leaving) harvest(numbers.created - leaving, nullptr, nullptr);
}

// Everything that waiting can free, and every page that nothing lies on, goes to the pool. Returns how many.
std::size_t Heap::settle(Lock& lock) {
  ++waits_;
  settle_waiting(lock);
  const std::size_t pages = harvest(~std::size_t{0}, nullptr, nullptr);
  Unlocked unlocked(lock);
  mapper_->reap(true);
  return pages;
}

void Heap::settle_waiting(Lock& lock) {
  std::vector<Awaited> all;
  for (Waiting& waiting : waiting_) all.push_back(mapper_->fences.awaited(waiting.fence));
  {
    Unlocked unlocked(lock);
    for (const Awaited& each : all) mapper_->fences.wait(each);
  }
  reuse_passed();
  drop_released();
}

// Takes up to `pages` whole pages out of free blocks; they retire. Returns how many. Small blocks go first: they are
// the least likely to serve where they lie, and recorded traces replay with half as many moves as the other way round.
std::size_t Heap::harvest(std::size_t pages, const Blocks::Block* keep_before, const Blocks::Block* keep_after) {
  std::size_t taken = 0;
  for (auto& [key, arenas] : arenas_) {
    for (auto& arena : arenas) {
      if (held(*arena) || key.place == Place::kHost) continue;
      Spans spans;
      arena->blocks.visit_large([&](Blocks::Block* block) {
        const std::uint64_t begin = arena->blocks.inner_begin(block);
        std::uint64_t end = arena->blocks.inner_end(block);
        if (block == keep_before || block == keep_after || begin >= end) return true;
        end = begin + std::min<std::uint64_t>((end - begin) / page_, pages - taken) * page_;
        spans.push_back({begin / page_, (end - begin) / page_});
        taken += spans.back().count;
        arena->blocks.punch(block, begin, end);
        return taken < pages;
      });
      if (!spans.empty()) mapper_->retire(*arena->range, spans);
      for (const Span& span : spans) tell_unmapped(*arena, span);
      if (taken >= pages) return taken;
    }
  }
  return taken;
}

// A graph replays from the addresses of its pool: they keep their pages until the pool is released.
bool Heap::held(const Arena& arena) const { return pools_.count(arena.key.pool) > 0; }

void Heap::reuse_passed() {
  while (!waiting_.empty() && mapper_->fences.passed(waiting_.front().fence)) {
    Blocks::Block* block = waiting_.front().block;
    waiting_.pop_front();
    release(block);
  }
}

// Ahead of a fork: a child needs nothing of what is free. Smaller blocks are copied faster than they are told.
void Heap::tell_idle() const {
  constexpr std::uint64_t kWorthTelling = 4096;
  for (const auto& [key, arenas] : arenas_) {
    for (const auto& arena : arenas) {
      for (const Blocks::Block* block = arena->blocks.first(); block != nullptr; block = block->after) {
        if (block->state == Blocks::State::kFree && block->size >= kWorthTelling)
          mapper_->space.driver.idle_at_fork(arena->range->base + block->offset, block->size);
      }
    }
  }
}

std::size_t Heap::trim_and_wait() {
  Lock lock(mutex);
  return mapper_->fences.capturing() ? 0 : settle(lock);
}

std::size_t Heap::idle_pages() {
  Lock lock(mutex);
  if (!mapper_->fences.capturing()) settle_waiting(lock);
  std::size_t pages = 0;
  for (auto& [key, arenas] : arenas_) {
    for (auto& arena : arenas) {
      if (held(*arena) || key.place == Place::kHost) continue;
      arena->blocks.visit_large([&](Blocks::Block* block) {
        const std::uint64_t begin = arena->blocks.inner_begin(block), end = arena->blocks.inner_end(block);
        if (begin < end) pages += (end - begin) / page_;
        return true;
      });
    }
  }
  return pages;
}

void Heap::shrink(bool wait) {
  wait = wait && !mapper_->fences.capturing();
  {
    Lock lock(mutex);
    if (wait) settle_waiting(lock);
    if (mapper_->space.device.above_budget()) give_back();
  }
  if (wait) mapper_->reap(true);
}

}  // namespace ballonet
