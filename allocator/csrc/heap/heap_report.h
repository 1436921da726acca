// Reports of the heap: torch's statistics, and torch's history through an observer.
//
// Guarantees: an allocation and a free are one call each, and take no lock and no driver call.
//
// Lock: the heap's, held by the caller. The observer is told under it.
#pragma once

#include <cstdint>
#include <string>

#include "heap/arenas.h"
#include "mapping/mapper.h"
#include "torch/entry.h"

namespace ballonet {

// Counts for torch's statistics of the heap: levels with their peaks and their totals.
//
// Note [Counting once]
// A hit is a few dozen instructions, so counting must not cost as much again. An allocation and a free are one call
// each. They change the blocks handed out, of the size class and of all; an allocation adds to the totals of its class
// and compares peaks, which it alone can raise. The rest is derived on request: the totals of all blocks, the blocks
// given back, and active blocks, which are those handed out or waiting for streams.
//
// Lock: the heap's, held by the caller.

struct Level {
  std::uint64_t current = 0, peak = 0;
  std::uint64_t added = 0, removed = 0;  // since the process started
};

// Counts of the blocks of one size class, or of all.
struct Usage {
  Level blocks, bytes, requested;     // handed out
  Level active_blocks, active_bytes;  // these, and what was given back and waits for streams
  Level mapped;                       // bytes of device pages under free and live blocks
};

// Lock: the heap's.
class HeapUsage {
 public:
  void allocated(bool small, std::uint64_t size, std::uint64_t asked) {
    Kind& mine = kinds_[class_of(small)];
    mine.added.blocks += 1;
    mine.added.bytes += size;
    mine.added.requested += asked;
    for (Kind* kind : {&mine, &kinds_[BALLONET_ALL]}) {
      kind->now.blocks += 1;
      kind->now.bytes += size;
      kind->now.requested += asked;
      kind->raise_peaks();
    }
  }
  // `waits`: for streams; `passed` says when they have passed.
  void freed(bool small, std::uint64_t size, std::uint64_t asked, bool waits) {
    for (Kind* kind : {&kinds_[class_of(small)], &kinds_[BALLONET_ALL]}) {
      kind->now.blocks -= 1;
      kind->now.bytes -= size;
      kind->now.requested -= asked;
      if (!waits) continue;
      kind->waiting_blocks += 1;
      kind->waiting_bytes += size;
    }
  }
  void passed(bool small, std::uint64_t size) {
    for (Kind* kind : {&kinds_[class_of(small)], &kinds_[BALLONET_ALL]}) {
      kind->waiting_blocks -= 1;
      kind->waiting_bytes -= size;
    }
  }
  void mapped(bool small, std::uint64_t bytes) {
    for (Kind* kind : {&kinds_[class_of(small)], &kinds_[BALLONET_ALL]}) {
      Level& level = kind->mapped;
      level.current += bytes;
      level.added += bytes;
      raise(level.peak, level.current);
    }
  }
  void unmapped(bool small, std::uint64_t bytes) {
    for (Kind* kind : {&kinds_[class_of(small)], &kinds_[BALLONET_ALL]}) {
      kind->mapped.current -= bytes;
      kind->mapped.removed += bytes;
    }
  }
  void reset_peaks() {
    for (Kind& kind : kinds_) {
      kind.peak = {};
      kind.active_blocks_peak = kind.active_bytes_peak = 0;
      kind.raise_peaks();
      kind.mapped.peak = kind.mapped.current;
    }
  }

  std::uint64_t live_bytes() const { return kinds_[BALLONET_ALL].now.bytes; }
  std::uint64_t requested_peak() const { return kinds_[BALLONET_ALL].peak.requested; }
  // `which`: BALLONET_ALL, BALLONET_SMALL or BALLONET_LARGE.
  Usage of(int which) const {
    const Kind& kind = kinds_[which];
    const auto level = [&](std::uint64_t Sums::* sum, std::uint64_t peak, std::uint64_t waiting) {
      const std::uint64_t added = which == BALLONET_ALL
                                      ? kinds_[BALLONET_SMALL].added.*sum + kinds_[BALLONET_LARGE].added.*sum
                                      : kind.added.*sum;
      const std::uint64_t current = kind.now.*sum + waiting;
      return Level{current, peak, added, added - current};
    };
    return {level(&Sums::blocks, kind.peak.blocks, 0),
            level(&Sums::bytes, kind.peak.bytes, 0),
            level(&Sums::requested, kind.peak.requested, 0),
            level(&Sums::blocks, kind.active_blocks_peak, kind.waiting_blocks),
            level(&Sums::bytes, kind.active_bytes_peak, kind.waiting_bytes),
            kind.mapped};
  }

 private:
  struct Sums {
    std::uint64_t blocks = 0, bytes = 0, requested = 0;
  };
  struct Kind {
    Sums now, peak;  // of what is handed out
    Sums added;      // since the process started; of a size class
    std::uint64_t waiting_blocks = 0, waiting_bytes = 0;
    std::uint64_t active_blocks_peak = 0, active_bytes_peak = 0;
    Level mapped;

    void raise_peaks() {
      raise(peak.blocks, now.blocks);
      raise(peak.bytes, now.bytes);
      raise(peak.requested, now.requested);
      raise(active_blocks_peak, now.blocks + waiting_blocks);
      raise(active_bytes_peak, now.bytes + waiting_bytes);
    }
  };

  static void raise(std::uint64_t& peak, std::uint64_t value) {
    if (value > peak) peak = value;
  }
  static int class_of(bool small) { return small ? BALLONET_SMALL : BALLONET_LARGE; }

  Kind kinds_[BALLONET_CLASSES];
};

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

// The error texts for memory that has run out, with what to do about it.
//
// Guarantees: the text begins with the words of torch's own error, and ends with what to do.
//
// Lock: the first wants the heap's held by the caller, for the statistics; the second none.

// The text for a failed allocation of `asked` bytes, which `missing` more pages would have served (0: not known).
std::string exhausted(Mapper& mapper, const HeapUsage& usage, std::size_t asked, const std::string& reason,
                      std::size_t missing);
// The text for host pages that could not be had.
std::string host_exhausted(Mapper& mapper, std::size_t pages, const std::string& reason);

}  // namespace ballonet
