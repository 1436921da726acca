// The slow path of an allocation: finds a free block where no arena of its stream has one.
//
// In order: pages behind a hole between blocks; pages and blocks that waiting frees; reclaimed pages; a free block that
// a memory pool lends; host pages.
//
// Note [Spilling]
// A block that no device page can be had for lies on host pages: slower to use, and valid. Such blocks have arenas of
// their own, which are asked last, so that nothing that is allocated lies there while there are device pages, and a
// host page goes as soon as no block lies on it. A live block stays where it is. Moving its bytes would need the
// certainty that no thread writes them meanwhile, and the users of a block are not known: there is no lease on a
// tensor, and another thread may be in the middle of an operator or launch one at any moment. So spilling is undone by
// freeing: the next allocation after the pressure is gone has device pages again. A graph replays from its addresses
// for as long as it lives, so that nothing of a pool and nothing during a capture is spilled.
//
// Guarantees: a failure takes nothing; during a stream capture nothing is waited for.
//
// Lock: the heap's. Functions with a HeapLock let go of it while they wait, and while others' pages are taken.
#pragma once

#include <atomic>
#include <string>

#include "heap/live_blocks.h"
#include "reclaim/reclaim.h"

namespace ballonet {

class BlockSupply {
 public:
  // `spill`: may blocks lie on host pages?
  BlockSupply(Mapper& mapper, Reclaim& reclaim, Arenas& arenas, PrivatePools& pools, HeapPages& pages, LiveBlocks& live,
              HeapReport& report, bool spill)
      : mapper_(mapper),
        reclaim_(reclaim),
        arenas_(arenas),
        pools_(pools),
        pages_(pages),
        live_(live),
        report_(report),
        page_(mapper.space.page_size),
        spill_(spill) {}

  // A free block to cut `size` from, and its arena. Throws PoolExhausted with a message for the user, DriverError.
  Blocks::Block* find(HeapLock& lock, const ArenaKey& key, std::uint64_t size, Arena*& arena);
  // Gives up to `pages` whole unused pages to the pool, once the streams that used them have passed, and frees all that
  // waiting can free. Returns how many.
  std::size_t give_up_idle(HeapLock& lock, std::size_t pages = ~std::size_t{0});

  // May be called without the lock.
  void allow_spilling(bool allowed) { limited_ = !allowed; }
  // Called once, when the first block is spilled, under locks.
  static std::atomic<void (*)()> on_spill;

  struct Counts {
    std::uint64_t retries = 0, refusals = 0, waits = 0;  // see Heap::Numbers
  };
  const Counts& counts() const { return counts_; }

 private:
  Blocks::Block* fit(HeapLock& lock, const ArenaKey& key, std::uint64_t size, Arena*& arena);
  Blocks::Block* fit_with_idle(HeapLock& lock, const ArenaKey& key, std::uint64_t size, Arena*& arena);
  Blocks::Block* fit_with_reclaimed(HeapLock& lock, const ArenaKey& key, std::uint64_t size, Arena*& arena);
  Blocks::Block* spill(HeapLock& lock, const ArenaKey& key, std::uint64_t size, Arena*& arena, std::string& reason);

  Mapper& mapper_;
  Reclaim& reclaim_;
  Arenas& arenas_;
  PrivatePools& pools_;
  HeapPages& pages_;
  LiveBlocks& live_;
  const HeapReport& report_;
  const std::uint64_t page_;
  const bool spill_;
  std::atomic<bool> limited_{false};
  Counts counts_;
};

}  // namespace ballonet
