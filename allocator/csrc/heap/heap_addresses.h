// Finds the heap of an address, by address alone and without a lock: for every free of every CPU tensor.
//
// Guarantees: the heap of a live block is found.
//
// Lock: `find` needs none; the others take one of their own, under which nothing else is taken.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>

#include "base/errors.h"
#include "base/fork.h"
#include "base/tuning.h"

namespace ballonet {

class Heap;

// The stretches of addresses that heaps hand blocks out of. They are few: one or two per stream.
class HeapAddresses {
 public:
  static HeapAddresses& all() {
    static HeapAddresses addresses;
    return addresses;
  }

  void add(std::uint64_t begin, std::uint64_t end, Heap* heap) {
    std::lock_guard<std::mutex> lock(mutex_);
    const std::size_t used = used_.load(std::memory_order_relaxed);
    std::size_t entry = 0;
    while (entry < used && entries_[entry].heap.load(std::memory_order_relaxed) != nullptr) ++entry;
    if (entry == tuning::kHeapRanges)
      throw UsageError(format("more than %zu streams and memory pools allocate at the same time", tuning::kHeapRanges));
    entries_[entry].begin.store(begin, std::memory_order_relaxed);
    entries_[entry].end.store(end, std::memory_order_relaxed);
    entries_[entry].heap.store(heap, std::memory_order_release);
    if (entry == used) used_.store(used + 1, std::memory_order_release);
  }

  // Pre: no block of the stretch is live.
  void remove(std::uint64_t begin) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (Entry& entry : entries_) {
      if (entry.begin.load(std::memory_order_relaxed) != begin) continue;
      entry.heap.store(nullptr, std::memory_order_release);
      entry.begin.store(0, std::memory_order_relaxed);
      entry.end.store(0, std::memory_order_relaxed);
    }
  }

  // nullptr where the address is none of ours.
  Heap* find(const void* pointer) const {
    const auto address = reinterpret_cast<std::uint64_t>(pointer);
    const std::size_t used = used_.load(std::memory_order_acquire);
    for (std::size_t i = 0; i < used; ++i) {
      Heap* const heap = entries_[i].heap.load(std::memory_order_acquire);
      const bool inside = address >= entries_[i].begin.load(std::memory_order_relaxed) &&
                          address < entries_[i].end.load(std::memory_order_relaxed);
      if (heap != nullptr && inside) return heap;
    }
    return nullptr;
  }

 private:
  struct Entry {
    std::atomic<std::uint64_t> begin{0}, end{0};
    std::atomic<Heap*> heap{nullptr};
  };
  std::mutex mutex_;
  const HeldOverFork held_{ForkRank::kLast, mutex_};
  std::atomic<std::size_t> used_{0};
  std::array<Entry, tuning::kHeapRanges> entries_;
};

}  // namespace ballonet
