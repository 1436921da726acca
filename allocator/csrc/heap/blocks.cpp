#include "heap/blocks.h"

#include <algorithm>
#include <utility>

#include "base/errors.h"
#include "base/tuning.h"

namespace ballonet {

Blocks::Blocks(std::uint64_t extent, std::uint64_t page) : page_(page) {
  first_ = make();
  first_->size = extent;
  hang(first_);
}

// Sizes below 32 granules have a bin each; above, 32 bins to a power of two.
unsigned Blocks::bin_of(std::uint64_t size) {
  const std::uint64_t granules = size / kAlignment;
  if (granules < kSteps) return static_cast<unsigned>(granules);
  const unsigned log = 63U - static_cast<unsigned>(__builtin_clzll(granules));
  const unsigned step = static_cast<unsigned>(granules >> (log - 5)) & (kSteps - 1);
  return std::min((log - 4) * kSteps + step, kBins - 1);
}

Blocks::Block* Blocks::make() {
  if (spare_ == nullptr) return &slab_.emplace_back();
  Block* block = spare_;
  spare_ = block->next;
  *block = Block{};
  return block;
}

void Blocks::hang(Block* block) {
  Block** head = &holes_;
  if (block->state == State::kFree) {
    const unsigned bin = bin_of(block->size);
    head = &bins_[bin];
    map_[bin / kSteps] |= 1U << (bin % kSteps);
    top_ |= 1ULL << (bin / kSteps);
    free_bytes_ += block->size;
  }
  block->previous = nullptr;
  block->next = *head;
  if (*head != nullptr) (*head)->previous = block;
  *head = block;
}

void Blocks::unhang(Block* block) {
  if (block->next != nullptr) block->next->previous = block->previous;
  if (block->state == State::kFree) free_bytes_ -= block->size;
  if (block->previous != nullptr) {
    block->previous->next = block->next;
    return;
  }
  if (block->state == State::kHole) {
    holes_ = block->next;
    return;
  }
  const unsigned bin = bin_of(block->size);
  bins_[bin] = block->next;
  if (block->next != nullptr) return;
  map_[bin / kSteps] &= ~(1U << (bin % kSteps));
  if (map_[bin / kSteps] == 0) top_ &= ~(1ULL << (bin / kSteps));
}

Blocks::Block* Blocks::best_fit(std::uint64_t size) {
  const auto smallest = [size](Block* block) {
    Block* best = nullptr;
    for (unsigned look = 0; block != nullptr && look < tuning::kBlocksLookedAt; block = block->next, ++look) {
      if (block->size == size) return block;
      if (block->size > size && (best == nullptr || block->size < best->size)) best = block;
    }
    return best;
  };
  const unsigned bin = bin_of(size);
  if (Block* found = smallest(bins_[bin])) return found;
  const unsigned row = bin / kSteps, column = bin % kSteps;
  const std::uint32_t same_row = column + 1 < kSteps ? map_[row] & (~0U << (column + 1)) : 0;
  if (same_row != 0) return smallest(bins_[row * kSteps + static_cast<unsigned>(__builtin_ctz(same_row))]);
  const std::uint64_t above = top_ & ~((2ULL << row) - 1);
  if (above == 0) return nullptr;
  const unsigned next = static_cast<unsigned>(__builtin_ctzll(above));
  return smallest(bins_[next * kSteps + static_cast<unsigned>(__builtin_ctz(map_[next]))]);
}

// Cuts the block in two at `size`; returns the back part, hung nowhere. Pre: the block hangs nowhere.
Blocks::Block* Blocks::split(Block* block, std::uint64_t size) {
  Block* back = make();
  back->offset = block->offset + size;
  back->size = block->size - size;
  back->state = block->state;
  back->before = block;
  back->after = block->after;
  if (block->after != nullptr) block->after->before = back;
  block->after = back;
  block->size = size;
  return back;
}

// Joins a block that hangs nowhere with neighbours of its state, and hangs it up.
Blocks::Block* Blocks::join(Block* block) {
  const auto absorb = [this](Block* front, Block* back) {
    front->size += back->size;
    front->after = back->after;
    if (back->after != nullptr) back->after->before = front;
    back->next = std::exchange(spare_, back);
  };
  if (Block* after = block->after; after != nullptr && after->state == block->state) {
    unhang(after);
    absorb(block, after);
  }
  if (Block* before = block->before; before != nullptr && before->state == block->state) {
    unhang(before);
    absorb(before, block);
    block = before;
  }
  hang(block);
  return block;
}

// Cuts [from, to) out of a block; it hangs nowhere then, and what lies beside it hangs as before.
Blocks::Block* Blocks::cut(Block* block, std::uint64_t from, std::uint64_t to) {
  unhang(block);
  if (from > block->offset) {
    Block* const middle = split(block, from - block->offset);
    hang(block);
    block = middle;
  }
  if (to < block->offset + block->size) hang(split(block, to - block->offset));
  return block;
}

Blocks::Block* Blocks::take(Block* free, std::uint64_t size) { return carve(free, free->offset, size); }

Blocks::Block* Blocks::carve(Block* free, std::uint64_t offset, std::uint64_t size) {
  Block* const live = cut(free, offset, offset + size);
  live->state = State::kLive;
  ++live_;
  return live;
}

Blocks::Block* Blocks::release(Block* live) {
  --live_;
  live->state = State::kFree;
  live->shared = false;
  return join(live);
}

Blocks::Block* Blocks::fill(Block* hole, std::uint64_t from, std::uint64_t to) {
  Block* const backed = cut(hole, from, to);
  backed->state = State::kFree;
  return join(backed);
}

void Blocks::punch(Block* free, std::uint64_t from, std::uint64_t to) {
  Block* const bare = cut(free, from, to);
  bare->state = State::kHole;
  join(bare);
}

// Note [Placement]
// A block may begin in the free block before a hole, or end in the free block after it; the pages in between have to be
// backed. Of all holes the one with the fewest such pages wins, and among equals the one that leaves the least over.
Blocks::Placement Blocks::place(std::uint64_t size) const {
  Placement best;
  std::uint64_t fewest = ~0ULL;
  const auto offer = [&](Block* hole, std::uint64_t from, std::uint64_t to, std::uint64_t slack) {
    if (to - from > fewest || (to - from == fewest && slack >= best.slack)) return;
    fewest = to - from;
    best = {hole, from, to, slack};
  };
  const auto pages_up = [this](std::uint64_t bytes) { return (bytes + page_ - 1) / page_ * page_; };
  for (Block* hole = holes_; hole != nullptr; hole = hole->next) {
    const std::uint64_t begin = hole->offset, end = hole->offset + hole->size;
    const std::uint64_t front = hole->before != nullptr && hole->before->state == State::kFree ? hole->before->size : 0;
    const std::uint64_t back = hole->after != nullptr && hole->after->state == State::kFree ? hole->after->size : 0;
    if (front + hole->size + back < size) continue;
    if (const std::uint64_t need = pages_up(size - std::min(size, front)); need <= hole->size) {
      offer(hole, begin, begin + need, front + need - size);
    }
    // Not at the end of the addresses: that would spread blocks, and what describes them, over all of these.
    if (const std::uint64_t need = pages_up(size - std::min(size, back));
        need <= hole->size && hole->after != nullptr) {
      offer(hole, end - need, end, back + need - size);
    }
    offer(hole, begin, end, front + hole->size + back - size);
  }
  return best;
}

void Blocks::check() const {
  std::uint64_t offset = 0, free_bytes = 0;
  std::size_t live = 0, hung = 0, expected = 0;
  const Block* before = nullptr;
  for (const Block* block = first_; block != nullptr; block = block->after) {
    if (block->offset != offset || block->before != before || block->size == 0) {
      throw InvariantBroken(
          format("blocks do not tile their addresses at offset %llu", static_cast<unsigned long long>(offset)));
    }
    if (before != nullptr && before->state == block->state && block->state != State::kLive) {
      throw InvariantBroken(
          format("two neighbours at offset %llu were not joined", static_cast<unsigned long long>(offset)));
    }
    if (block->state == State::kHole && (block->offset % page_ != 0 || block->size % page_ != 0)) {
      throw InvariantBroken("a hole does not end on page boundaries");
    }
    if (block->state == State::kLive) ++live;
    if (block->state != State::kLive) ++expected;
    if (block->state == State::kFree) free_bytes += block->size;
    offset += block->size;
    before = block;
  }
  for (unsigned bin = 0; bin < kBins; ++bin) {
    const bool marked = (map_[bin / kSteps] >> (bin % kSteps) & 1U) != 0;
    if (marked != (bins_[bin] != nullptr)) throw InvariantBroken("the bit map of the bins does not match them");
    for (const Block* block = bins_[bin]; block != nullptr; block = block->next, ++hung) {
      if (block->state != State::kFree || bin_of(block->size) != bin)
        throw InvariantBroken("a block hangs in the wrong bin");
    }
  }
  for (const Block* hole = holes_; hole != nullptr; hole = hole->next, ++hung) {
    if (hole->state != State::kHole) throw InvariantBroken("something else hangs among the holes");
  }
  if (hung != expected || live != live_ || free_bytes != free_bytes_)
    throw InvariantBroken("the block counts do not add up");
}

}  // namespace ballonet
