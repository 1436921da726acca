// The stretches of addresses that the heap cuts its blocks from.
//
// Words
//   arena   one range and its blocks, for the allocations of one stream (and one torch memory pool) of one size class,
//           on device pages or on host pages
//
// Guarantees: by an arena's addresses its heap is found for as long as the arena exists; the first arena of a stream
// makes the stream known to every fence; an arena that goes gives its pages back, once all streams have passed.
//
// Lock: the heap's, held by the caller.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>
#include <utility>
#include <vector>

#include "base/errors.h"
#include "base/fork.h"
#include "base/tuning.h"
#include "heap/blocks.h"
#include "mapping/mapper.h"
#include "torch/entry.h"

namespace ballonet {

// Finds the heap of an address, by address alone and without a lock: for every free of every CPU tensor.
//
// Guarantees: the heap of a live block is found.
//
// Lock: `find` needs none; the others take one of their own, under which nothing else is taken.

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

class Heap;

struct ArenaKey {
  CUstream stream;
  BallonetPool pool;  // {0, 0}: none, the common heap
  bool small;
  Place place = Place::kDevice;
  bool operator<(const ArenaKey& other) const {
    return std::tie(stream, pool, small, place) < std::tie(other.stream, other.pool, other.small, other.place);
  }
  bool operator==(const ArenaKey& other) const {
    return stream == other.stream && pool == other.pool && small == other.small && place == other.place;
  }
  bool pooled() const { return pool != BallonetPool{}; }
};

struct Arena {
  Arena(Heap& heap, const ArenaKey& key_, std::shared_ptr<Range> range_, std::uint64_t page);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // The arena of a block that is handed out, or was and waits.
  static Arena& of(const Blocks::Block* block) { return *static_cast<Arena*>(block->tag); }
  std::uint64_t address(const Blocks::Block* block) const { return range->base + block->offset; }

  const ArenaKey key;
  const std::shared_ptr<Range> range;
  Blocks blocks;
};

class Arenas {
 public:
  using List = std::vector<std::unique_ptr<Arena>>;

  Arenas(Heap& heap, Mapper& mapper) : heap_(heap), mapper_(mapper) {}

  // The arenas of a key, none at first.
  List& of(const ArenaKey& key) {
    const unsigned hot = key.small ? 1 : 0;
    return hot_[hot] != nullptr && hot_key_[hot] == key ? *hot_[hot] : look_up(key);
  }
  // The arenas of a key, nullptr where there were none yet.
  List* find(const ArenaKey& key) {
    const auto found = arenas_.find(key);
    return found == arenas_.end() ? nullptr : &found->second;
  }
  // The free block to cut `size` from, and its arena; or nullptr.
  static Blocks::Block* best_fit(List& arenas, std::uint64_t size, Arena*& arena) {
    Blocks::Block* block = nullptr;
    for (auto candidate = arenas.begin(); candidate != arenas.end() && block == nullptr; ++candidate) {
      arena = candidate->get();
      block = arena->blocks.best_fit(size);
    }
    return block;
  }
  // A new arena, with room for a block of `size`. Throws DriverError, UsageError where there are too many.
  Arena& add(List& arenas, const ArenaKey& key, std::uint64_t size);

  // Every arena, and every one of a pool.
  std::vector<Arena*> all() const;
  std::vector<Arena*> of_pool(BallonetPool pool) const;
  // nullptr where a pool has no such address.
  Arena* at(BallonetPool pool, std::uint64_t address) const;

  // Drops the arenas of every key for which `done(key, arenas)`. Pre: none of their blocks is live.
  template <class Done>
  void drop(Done done) {
    for (auto entry = arenas_.begin(); entry != arenas_.end();) {
      entry = done(entry->first, entry->second) ? arenas_.erase(entry) : std::next(entry);
    }
    hot_[0] = hot_[1] = nullptr;
  }

  // Called ahead of a fork: a child needs no free memory.
  void tell_idle() const;
  // Every block that is live or free lies on backed pieces. Throws InvariantBroken. Returns how many blocks are live or
  // wait, and their bytes.
  std::pair<std::size_t, std::uint64_t> check() const;

 private:
  List& look_up(const ArenaKey& key);

  Heap& heap_;
  Mapper& mapper_;
  std::map<ArenaKey, List> arenas_;
  ArenaKey hot_key_[2]{};
  List* hot_[2] = {nullptr, nullptr};
};

}  // namespace ballonet
