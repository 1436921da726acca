// Memory pools of CUDA graphs and of torch.cuda.MemPool: the streams that allocate from one, and its number of users.
//
// Guarantees: a pool keeps its pages, at their addresses, for as long as it has users; a pool without users loses its
// arenas as soon as none of its blocks is live; while one is being filled no fence breaks a capture (Note [Fences and
// captures] in streams.h).
//
// Lock: the heap's. `begin`, `end`, `hold`, `release`, `users` and `set_use_on_oom` take it; the others need it held by
// the caller.
#pragma once

#include <functional>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "heap/arenas.h"
#include "heap/heap_report.h"

namespace ballonet {

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

}  // namespace ballonet
