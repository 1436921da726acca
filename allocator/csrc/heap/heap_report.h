// Reports of the heap: torch's statistics, and torch's history through an observer.
//
// Guarantees: an allocation and a free are one call each, and take no lock and no driver call.
//
// Lock: the heap's, held by the caller. The observer is told under it.
#pragma once

#include "heap/arenas.h"
#include "heap/usage.h"

namespace ballonet {

class HeapReport {
 public:
  explicit HeapReport(std::uint64_t page_size) : page_(page_size) {}

  // Sets the observer; nullptr: none.
  void observe(const BallonetObserver* observer) { observer_ = observer; }

  void handed_out(const Arena& arena, const Blocks::Block* block) {
    usage.allocated(arena.key.small, block->size, block->requested);
  }
  // A block that is shared waits for its streams; `passed` follows.
  void given_back(const Arena& arena, const Blocks::Block* block) {
    usage.freed(arena.key.small, block->size, block->requested, block->shared);
  }
  void passed(const Arena& arena, const Blocks::Block* block) {
    usage.passed(arena.key.small, block->size);
    if (observer_ != nullptr)
      observer_->passed(arena.address(block), block->requested, arena.key.stream, arena.key.pool);
  }

  // Notes that pages are behind these pieces of the arena now, or no longer.
  void mapped(const Arena& arena, const Span& span) {
    if (arena.key.place == Place::kDevice) usage.mapped(arena.key.small, span.count * page_);
    if (observer_ != nullptr) tell(observer_->mapped, arena, span);
  }
  void unmapped(const Arena& arena, const Span& span) {
    if (arena.key.place == Place::kDevice) usage.unmapped(arena.key.small, span.count * page_);
    if (observer_ != nullptr) tell(observer_->unmapped, arena, span);
  }
  // Notes that all of an arena is about to go. Pre: no block of it is live.
  void unmapped(const Arena& arena) {
    for (const Blocks::Block* block = arena.blocks.first(); block != nullptr; block = block->after) {
      if (block->state == Blocks::State::kFree) unmapped(arena, {block->offset / page_, block->size / page_});
    }
  }

  HeapUsage usage;

 private:
  void tell(BallonetObserver::Told told, const Arena& arena, const Span& span) const {
    told(arena.range->base + span.first * page_, span.count * page_, arena.key.stream, arena.key.pool);
  }

  const std::uint64_t page_;
  const BallonetObserver* observer_ = nullptr;
};

}  // namespace ballonet
