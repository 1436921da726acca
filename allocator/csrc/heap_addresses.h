// Which heap an address belongs to, by address alone and without a lock: every free of every CPU tensor asks.
//
// Guarantees: the heap of a live block is found.
//
// Lock: `find` needs none; the others take one of their own, under which nothing else is taken.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>

#include "errors.h"
#include "fork.h"

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
    std::size_t slot = 0;
    while (slot < used && slots_[slot].heap.load(std::memory_order_relaxed) != nullptr) ++slot;
    if (slot == kMost)
      throw UsageError(format("more than %zu streams and memory pools allocate at the same time", kMost));
    slots_[slot].begin.store(begin, std::memory_order_relaxed);
    slots_[slot].end.store(end, std::memory_order_relaxed);
    slots_[slot].heap.store(heap, std::memory_order_release);
    if (slot == used) used_.store(used + 1, std::memory_order_release);
  }

  // Pre: no block of the stretch is live.
  void remove(std::uint64_t begin) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (Slot& slot : slots_) {
      if (slot.begin.load(std::memory_order_relaxed) != begin) continue;
      slot.heap.store(nullptr, std::memory_order_release);
      slot.begin.store(0, std::memory_order_relaxed);
      slot.end.store(0, std::memory_order_relaxed);
    }
  }

  // nullptr where the address is none of ours.
  Heap* find(const void* pointer) const {
    const auto address = reinterpret_cast<std::uint64_t>(pointer);
    const std::size_t used = used_.load(std::memory_order_acquire);
    for (std::size_t i = 0; i < used; ++i) {
      Heap* const heap = slots_[i].heap.load(std::memory_order_acquire);
      const bool inside = address >= slots_[i].begin.load(std::memory_order_relaxed) &&
                          address < slots_[i].end.load(std::memory_order_relaxed);
      if (heap != nullptr && inside) return heap;
    }
    return nullptr;
  }

 private:
  static constexpr std::size_t kMost = 4096;
  struct Slot {
    std::atomic<std::uint64_t> begin{0}, end{0};
    std::atomic<Heap*> heap{nullptr};
  };
  std::mutex mutex_;
  const HeldOverFork held_{ForkRank::kLast, mutex_};
  std::atomic<std::size_t> used_{0};
  std::array<Slot, kMost> slots_;
};

}  // namespace ballonet
