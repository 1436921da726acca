// Block arithmetic: cuts one stretch of addresses into blocks. Pure: offsets only, no device and no lock.
//
// Words
//   live   handed out
//   free   backed and ready to be handed out; two free neighbours are always one block
//   hole   not backed; two neighbouring holes are always one; its ends lie on page boundaries
//
// Note [Best fit]
// Free blocks hang in bins by size, in two levels: the power of two, and 32 steps within it. A search looks through the
// bin of the size asked for and takes the smallest block that fits; if that bin has none, it takes the smallest of the
// next bin that is not empty, where every block fits. Two bit maps find that bin without a loop. Every list that is
// looked through is cut off after kBlocksLookedAt blocks, so that the time is bounded; what is then missed wastes less
// than a 32nd of the size.
//
// Guarantees, which `check` verifies: the blocks tile their addresses; two neighbours are never both free, nor both
// holes; every free block hangs in the bin of its size.
//
// Lock: none of its own; in an arena the heap's, held by the caller.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <utility>
#include <vector>

namespace ballonet {

class Blocks {
 public:
  static constexpr std::uint64_t kAlignment = 512;

  enum class State : std::uint8_t { kLive, kFree, kHole };

  struct Block {
    std::uint64_t offset = 0;
    std::uint64_t size = 0;
    std::uint64_t requested = 0;  // live: what was asked for
    Block* before = nullptr;      // neighbours in address
    Block* after = nullptr;
    Block* previous = nullptr;  // neighbours in the bin, or among the holes
    Block* next = nullptr;
    void* tag = nullptr;  // live: its arena, for the heap
    State state = State::kHole;
    bool shared = false;  // live: used on other streams than its own
  };

  // One hole of `extent` bytes. Pre: a multiple of `page`.
  Blocks(std::uint64_t extent, std::uint64_t page);
  Blocks(const Blocks&) = delete;
  Blocks& operator=(const Blocks&) = delete;

  static std::uint64_t rounded(std::uint64_t size) { return (size + kAlignment - 1) / kAlignment * kAlignment; }

  // The free block to cut `size` from, or nullptr. Pre: rounded.
  Block* best_fit(std::uint64_t size);
  // Cuts `size` from the front of a free block; the rest stays free. Returns the live block.
  Block* take(Block* free, std::uint64_t size);
  // Cuts [offset, offset + size) out of a free block; the rest stays free. Returns the live block. Pre: inside it.
  Block* carve(Block* free, std::uint64_t offset, std::uint64_t size);
  // A live block becomes free and joins its neighbours. Returns the joined block.
  Block* release(Block* live);
  // [from, to) of a hole becomes free and joins its neighbours. Pre: page boundaries. Returns the joined block.
  Block* fill(Block* hole, std::uint64_t from, std::uint64_t to);
  // [from, to) of a free block becomes a hole and joins its neighbours. Pre: page boundaries.
  void punch(Block* free, std::uint64_t from, std::uint64_t to);

  // The place where a block of `size` costs the fewest pages.
  struct Placement {
    Block* hole = nullptr;  // nullptr: no room among these addresses
    std::uint64_t from = 0, to = 0;
    std::uint64_t slack = 0;  // free bytes that would be left over beside it
  };
  Placement place(std::uint64_t size) const;

  // The whole pages inside a free block: [first, last) in bytes, empty where first >= last.
  std::pair<std::uint64_t, std::uint64_t> inner(const Block* free) const {
    return {(free->offset + page_ - 1) / page_ * page_, (free->offset + free->size) / page_ * page_};
  }

  // Visits free blocks of at least one page, smallest bin first; the visitor may punch the block it is given. Stops
  // when the visitor says false.
  template <class Visitor>
  void visit_large(Visitor visit) {
    for (unsigned i = bin_of(page_); i < kBins; ++i) {
      for (Block* block = bins_[i]; block != nullptr;) {
        Block* next = block->next;
        if (block->size >= page_ && !visit(block)) return;
        block = next;
      }
    }
  }

  bool empty() const { return live_ == 0; }
  std::uint64_t free_bytes() const { return free_bytes_; }
  // Throws InvariantBroken.
  void check() const;
  const Block* first() const { return first_; }
  Block* first() { return first_; }

 private:
  static constexpr unsigned kSteps = 32;
  static constexpr unsigned kBins = kSteps * 48;

  static unsigned bin_of(std::uint64_t size);
  Block* make();
  void hang(Block* block);
  void unhang(Block* block);
  Block* cut(Block* block, std::uint64_t from, std::uint64_t to);
  Block* split(Block* block, std::uint64_t size);
  Block* join(Block* block);

  std::uint64_t page_;
  std::array<Block*, kBins> bins_{};
  std::array<std::uint32_t, kBins / kSteps> map_{};
  std::uint64_t top_ = 0;
  Block* holes_ = nullptr;
  Block* first_ = nullptr;
  Block* spare_ = nullptr;
  std::deque<Block> slab_;
  std::size_t live_ = 0;
  std::uint64_t free_bytes_ = 0;
};

// From the address of a live block to the block: open addressing, because a node per block would cost more than the
// block.
//
// Guarantees: what was put in is found until it is erased, however full the map is.
//
// Lock: the heap's, held by the caller.

class AddressMap {
 public:
  AddressMap() : entries_(1024) {}

  void insert(std::uint64_t address, Blocks::Block* block) {
    if ((count_ + 1) * 2 > entries_.size()) grow();
    put(address, block);
    ++count_;
  }

  Blocks::Block* find(std::uint64_t address) const {
    for (std::size_t i = home(address);; i = (i + 1) & (entries_.size() - 1)) {
      if (entries_[i].address == address) return entries_[i].block;
      if (entries_[i].block == nullptr) return nullptr;
    }
  }

  // Returns what was removed, nullptr where there was nothing. Entries after it move up, so that no search meets a gap.
  Blocks::Block* erase(std::uint64_t address) {
    const std::size_t mask = entries_.size() - 1;
    std::size_t gap = home(address);
    for (; entries_[gap].block != nullptr && entries_[gap].address != address; gap = (gap + 1) & mask) {
    }
    Blocks::Block* removed = entries_[gap].block;
    if (removed == nullptr) return nullptr;
    for (std::size_t i = (gap + 1) & mask; entries_[i].block != nullptr; i = (i + 1) & mask) {
      if (((i - home(entries_[i].address)) & mask) < ((i - gap) & mask)) continue;
      entries_[gap] = entries_[i];
      gap = i;
    }
    entries_[gap] = {};
    --count_;
    return removed;
  }

  std::size_t size() const { return count_; }

 private:
  struct Entry {
    std::uint64_t address = 0;
    Blocks::Block* block = nullptr;
  };

  std::size_t home(std::uint64_t address) const {
    return static_cast<std::size_t>((address / Blocks::kAlignment) * 0x9E3779B97F4A7C15ULL >> 20) &
           (entries_.size() - 1);
  }

  void put(std::uint64_t address, Blocks::Block* block) {
    std::size_t i = home(address);
    while (entries_[i].block != nullptr) i = (i + 1) & (entries_.size() - 1);
    entries_[i] = {address, block};
  }

  void grow() {
    std::vector<Entry> old(entries_.size() * 2);
    old.swap(entries_);
    for (const Entry& entry : old) {
      if (entry.block != nullptr) put(entry.address, entry.block);
    }
  }

  std::vector<Entry> entries_;
  std::size_t count_ = 0;
};

}  // namespace ballonet
