// Saves which blocks of a memory pool are live, and restores that.
//
// Note [Checkpoints]
// Replaying a graph allocates nothing, so that after a replay the heap does not know which of the graph's outputs live.
// Before another graph is captured into the same pool, torch puts the pool back into the state in which it was when the
// graph's own capture ended: blocks that live now are freed, and those that lived then are handed out at the same
// addresses. (inductor's graph trees, torch.compile with mode="reduce-overhead".) The pages are still there: a pool
// keeps them for as long as it has users.
//
// Guarantees: a block that is put back has the address and the size that it had; a refusal changes nothing.
//
// Lock: everything here takes the heap's.
#pragma once

#include <mutex>
#include <vector>

#include "heap/live_blocks.h"

namespace ballonet {

struct Checkpoint {
  struct Live {
    std::uint64_t address, size, requested;
  };
  BallonetPool pool;
  std::vector<Live> blocks;
};

class Checkpoints {
 public:
  Checkpoints(std::mutex& heap, Mapper& mapper, const Arenas& arenas, const PrivatePools& pools, LiveBlocks& live)
      : mutex_(heap), mapper_(mapper), arenas_(arenas), pools_(pools), live_(live) {}

  // Throws UsageError where there is no such pool.
  Checkpoint take(BallonetPool pool);
  struct Restored {
    std::vector<void*> freed, created;
  };
  // Throws UsageError with nothing changed.
  Restored restore(const Checkpoint& state);

 private:
  std::mutex& mutex_;
  Mapper& mapper_;
  const Arenas& arenas_;
  const PrivatePools& pools_;
  LiveBlocks& live_;
};

}  // namespace ballonet
