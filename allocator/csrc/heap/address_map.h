// From the address of a live block to the block: open addressing, because a node per block would cost more than the
// block.
//
// Guarantees: what was put in is found until it is erased, however full the map is.
//
// Lock: the heap's, held by the caller.
#pragma once

#include <cstdint>
#include <vector>

#include "heap/blocks.h"

namespace ballonet {

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
