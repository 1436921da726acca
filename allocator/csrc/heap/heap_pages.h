// Maps pages under the heap's free blocks, and harvests them; memory pools, which keep theirs.
//
// Note [Growing]
// Before the pool creates pages beyond the peak of live bytes (and a small allowance), pages that lie idle inside free
// blocks are moved to where they are needed. So physical memory follows the peak of live bytes and not the sum of each
// stream's or each size's own peak. In steady state every allocation finds a free block that is backed and the driver
// is not called. During a stream capture nothing is moved: that would have to wait for a stream.
//
// Idle pages may be in use by kernels that were launched before, and the host would wait for all that every stream has
// been given. Instead, pages are made beyond the peak, up to as many again and within the budget; the idle ones are
// free once the streams have passed.
//
// Note [Giving]
// Where others lack pages, the idle ones that are given up first need not be needed again: but what is idle between two
// operators of a layer is, as a rule, what the next ones lie on. To unmap all of it and to map it again would cost a
// driver call per page and layer. So no more is given than is lacking, and twice as much each time that nothing was
// mapped since the last time: pages that activations no longer need are soon given, and no more than twice the request
// is given too early.
//
// Guarantees: a hole is backed as a whole or, with an exception or false, not at all; harvested pages lie under no live
// block and in no memory pool that has users; a host page goes as soon as no block lies on it.
//
// Lock: the heap's, held by the caller. Nothing here waits for a stream.
#pragma once

#include <functional>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "heap/arenas.h"
#include "heap/heap_report.h"

namespace ballonet {

// Memory pools of CUDA graphs and of torch.cuda.MemPool: the streams that allocate from one, and its number of users.
//
// Guarantees: a pool keeps its pages, at their addresses, for as long as it has users; a pool without users loses its
// arenas as soon as none of its blocks is live; while one is being filled no fence breaks a capture (Note [Fences and
// captures] in streams.h).
//
// Lock: the heap's. `begin`, `end`, `hold`, `release`, `users` and `set_use_on_oom` take it; the others need it held by
// the caller.

using StreamFilter = std::function<bool(CUstream)>;

class PrivatePools {
 public:
  PrivatePools(std::mutex& heap, Mapper& mapper, Arenas& arenas, HeapReport& report)
      : mutex_(heap), mapper_(mapper), arenas_(arenas), report_(report) {}

  // Begins allocating from the pool on streams that pass the filter. Throws UsageError where it is being filled
  // already.
  void begin(BallonetPool pool, StreamFilter filter);
  void end(BallonetPool pool);
  // `begin` and `hold` add a user, `release` takes one.
  void hold(BallonetPool pool);
  void release(BallonetPool pool);
  unsigned users(BallonetPool pool);
  // May allocations that fit nowhere else lie in free blocks of this pool?
  void set_use_on_oom(BallonetPool pool, bool use);

  // The pool that a stream allocates from, {0, 0} where that is none.
  BallonetPool of(CUstream stream) const { return filling_.empty() ? BallonetPool{} : filled_by(stream); }
  // Does the pool have users? A graph replays from its addresses: they keep their pages until the pool is released.
  bool held(BallonetPool pool) const { return pools_.count(pool) > 0; }
  // A free block of another pool that lends what it caches when memory runs out, or nullptr.
  Blocks::Block* lent(const ArenaKey& key, std::uint64_t size, Arena*& arena);
  // Drops the arenas of released pools as soon as no block of theirs is live.
  void drop_released();

 private:
  struct Pooled {
    unsigned users = 0;
    bool use_on_oom = false;
  };

  BallonetPool filled_by(CUstream stream) const;

  std::mutex& mutex_;
  Mapper& mapper_;
  Arenas& arenas_;
  HeapReport& report_;
  std::vector<std::pair<BallonetPool, StreamFilter>> filling_;
  std::map<BallonetPool, Pooled> pools_;
};

class HeapPages {
 public:
  HeapPages(Mapper& mapper, const Arenas& arenas, const PrivatePools& pools, HeapReport& report)
      : mapper_(mapper), arenas_(arenas), pools_(pools), report_(report), page_(mapper.space.page_size) {}

  // Backs a hole: with pages that lie idle, then with new ones. Pages are moved only from where they are not beside the
  // hole, so that the placement stays true. False where some were, with the hole as it was: they are free once every
  // stream has passed. Throws PoolExhausted, DriverError.
  bool back(Arena& arena, const Blocks::Placement& placement, bool may_harvest);
  // May pages be made for the hole while harvested ones are waited for?
  bool may_outgrow(const Blocks::Placement& placement) const;
  // Takes up to `pages` whole pages out of free blocks, but for two that stay as they are; they retire. Returns how
  // many.
  std::size_t harvest(std::size_t pages, const Blocks::Block* keep_before = nullptr,
                      const Blocks::Block* keep_after = nullptr);
  // How many idle pages to give for those that others lack. See Note [Giving].
  std::size_t worth_giving(std::size_t lacking);
  // Harvests what exists above the budget and is not leaving. Leaving are pages that retire; with `retiring` false,
  // after a wait for all streams, those that are free: what still retires then is shown elsewhere.
  void harvest_excess(bool retiring = true);
  // How many pages could be harvested.
  std::size_t idle() const;
  // Gives back host pages wholly inside a free block. Does nothing where the arena has pages of the device.
  void unspill(Arena& arena, Blocks::Block* free) {
    if (arena.key.place != Place::kDevice) give_up_host(arena, free);
  }

 private:
  bool harvestable(const Arena& arena) const {
    return arena.key.place == Place::kDevice && !pools_.held(arena.key.pool);
  }
  void give_up_host(Arena& arena, Blocks::Block* free);
  std::uint64_t allowance() const;
  // Pages of activations, free pages and retiring ones.
  static std::size_t ours(const Mapper::Numbers& numbers);
  void map(Arena& arena, const Blocks::Placement& placement);

  Mapper& mapper_;
  const Arenas& arenas_;
  const PrivatePools& pools_;
  HeapReport& report_;
  const std::uint64_t page_;
  std::size_t given_ = 0;  // pages given the last time that others lacked some; 0: pages were mapped since
};

}  // namespace ballonet
