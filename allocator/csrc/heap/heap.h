// The caching allocator under torch: blocks of any size cut from ranges whose pages come and go. This is the fast path,
// and the assembly of the parts behind it. Each part uses only those before it.
//
//   arenas       ranges, and the blocks cut from them
//   report       statistics, and torch's history
//   pools        memory pools of graphs and of torch.cuda.MemPool
//   pages        how pages come to blocks, and leave them
//   live         blocks that are handed out, or wait for streams
//   supply       the slow path, up to spilling to the host
//   checkpoints  which blocks of a pool are live, put back
//   snapshot     segments, for torch
//
// Note [Packing]
// Blocks are cut at 512 bytes, not at pages: two large blocks share the page between them, so the waste is one partial
// page per arena and fragmentation. Addresses cost nothing, so a block that fits nowhere is placed where the fewest
// pages have to be backed, in a hole between blocks or at the end.
//
// Guarantees, which `check` verifies as far as books tell: every block that is live or free lies on backed pieces of
// its arena's range; an allocation that fails has taken nothing; one that finds a free block calls no driver.
//
// Lock: `mutex`. All functions here take it, unless they say otherwise; so do the public parts. The other parts need it
// held.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "base/fork.h"
#include "base/tuning.h"
#include "heap/block_supply.h"
#include "heap/live_blocks.h"

namespace ballonet {

class Heap {
 public:
  static constexpr std::uint64_t kLargest = 1ULL << 45;

  // `spill`: may blocks lie on host pages?
  Heap(std::shared_ptr<Mapper> mapper, Reclaim& reclaim, bool spill);

  // Throws PoolExhausted with a message for the user. Pre: size > 0.
  void* allocate(std::size_t size, CUstream stream);
  // Unknown addresses are ignored. Throws nothing.
  bool deallocate(void* address);  // false: unknown
  void record_stream(void* address, CUstream stream);
  std::size_t block_size(void* address);

  // Gives every page under no live block to the pool; returns how many. Waits for the streams that used them; does
  // nothing during a stream capture.
  std::size_t trim_and_wait();
  // Gives pages to others that lack so many, no more than is worth it (heap_pages.h, Note [Giving]).
  std::size_t give(std::size_t lacking);
  // The number of pages under no live block. `wait`: for streams that use blocks which were freed.
  std::size_t idle_pages(bool wait);
  // Gives pages under no live block to the driver, as many as exist above the budget. `wait`: for the streams that used
  // them; not during a capture.
  void shrink(bool wait);
  // A program that limits its share of the device's memory expects errors beyond it, not host pages.
  void allow_spilling(bool allowed) { supply_.allow_spilling(allowed); }  // takes no lock

  struct Numbers {
    std::uint64_t live, live_peak, requested, requested_peak, blocks, allocations, frees, hits;
    std::uint64_t allocated_total, freed_total, cached;
    std::uint64_t retries, refusals, waits;  // allocations tried again, refused; how often all streams were waited for
    Usage usage[BALLONET_CLASSES];
  };
  Numbers numbers_locked() const;  // pre: the caller holds `mutex`
  // The error text of a failed allocation; see heap_report.h. Pre: the caller holds `mutex`.
  std::string exhausted(std::size_t asked, const std::string& reason, std::size_t missing = 0);
  void reset_peaks();
  // Sets the observer, which is called under the lock; nullptr: none.
  void observe(const BallonetObserver* observer);
  // Throws InvariantBroken.
  void check();
  // Retires every arena without live blocks; returns how many blocks are live.
  std::size_t close();

  std::mutex mutex;

 private:
  void harvest_excess();

  const std::shared_ptr<Mapper> mapper_;
  const std::uint64_t small_ = std::min<std::uint64_t>(tuning::kSmallBlock, mapper_->space.page_size / 2);
  Arenas arenas_{*this, *mapper_};
  HeapReport report_{mapper_->space.page_size};

 public:
  PrivatePools pools{mutex, *mapper_, arenas_, report_};

 private:
  HeapPages pages_{*mapper_, arenas_, pools, report_};
  LiveBlocks live_{*mapper_, pools, pages_, report_};
  BlockSupply supply_;

 public:
  Checkpoints checkpoints{mutex, *mapper_, arenas_, pools, live_};
  HeapSnapshot snapshot{mutex, arenas_, live_};

 private:
  std::uint64_t hits_ = 0;
  const HeldOverFork held_{ForkRank::kHeap, mutex, [this] { arenas_.tell_idle(); }};
};

}  // namespace ballonet
