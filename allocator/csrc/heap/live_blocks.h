// The blocks that are handed out, and those given back that wait until other streams have passed; what torch saves and
// shows of them.
//
// Note [Streams]
// A block freed on its own stream is reused by that stream at once: the stream's order protects it. A block that was
// also used elsewhere (record_stream) waits for a fence on those streams. Pages that leave an arena wait for every
// stream. The per-thread default stream has one handle for all threads: its blocks lie beside those of the legacy
// stream, which is ordered with the work of each, and one that is freed waits for a fence there.
//
// Note [Waiting without the lock]
// Any thread may free a tensor, also one that holds the interpreter's lock, which a stream's work may need in turn. So
// a thread that waits for a stream lets go of the heap's lock, and looks for its place anew afterwards.
//
// Guarantees: a block is free again once all work that used it is ordered before what its next owner submits.
//
// Lock: the heap's, held by the caller. Functions with a HeapLock let go of it while they wait.
#pragma once

#include <deque>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "heap/blocks.h"
#include "heap/heap_pages.h"

namespace ballonet {

using HeapLock = std::unique_lock<std::mutex>;

class LiveBlocks {
 public:
  LiveBlocks(Mapper& mapper, PrivatePools& pools, HeapPages& pages, HeapReport& report)
      : mapper_(mapper), pools_(pools), pages_(pages), report_(report) {}

  // A block that was cut for `requested` bytes becomes a live one. Returns its address.
  void* hand_out(Arena& arena, Blocks::Block* block, std::uint64_t requested) {
    block->requested = requested;
    block->tag = &arena;
    const std::uint64_t address = arena.address(block);
    live_.insert(address, block);
    report_.handed_out(arena, block);
    return reinterpret_cast<void*>(address);
  }
  // The block that is handed out at an address, nullptr where none is.
  Blocks::Block* at(std::uint64_t address) const { return live_.find(address); }
  // Frees the block, at once or when its streams have passed. False: unknown.
  bool give_back(std::uint64_t address) {
    Blocks::Block* block = live_.erase(address);
    if (block == nullptr) return false;
    report_.given_back(Arena::of(block), block);
    block->shared ? wait_for_streams(block) : release(block);
    return true;
  }
  // Frees the block at once, whichever streams used it.
  void* free_now(Arena& arena, Blocks::Block* block);
  // Notes a use on another stream: the block is reused only once that stream's work at the time of its free has passed.
  void use_on(Blocks::Block* block, CUstream stream);

  // Frees waiting blocks whose streams have passed.
  void free_passed();
  // Waits for all waiting blocks, without the lock. Memory pools without users lose their arenas then.
  void wait_freed(HeapLock& lock);
  // Does a block of the pool wait?
  bool any_waits(BallonetPool pool) const;
  // Blocks that are handed out or wait.
  std::size_t size() const { return live_.size() + waiting_.size(); }
  // Throws InvariantBroken unless the arenas' `blocks` and `bytes` agree.
  void check(std::size_t blocks, std::uint64_t bytes) const;

 private:
  struct Waiting {
    Fence fence;
    Blocks::Block* block;
  };

  void wait_for_streams(Blocks::Block* block);
  void release(Blocks::Block* block) {
    Arena& arena = Arena::of(block);
    if (block->shared) report_.passed(arena, block);
    pages_.unspill(arena, arena.blocks.release(block));
  }

  Mapper& mapper_;
  PrivatePools& pools_;
  HeapPages& pages_;
  HeapReport& report_;
  AddressMap live_;
  std::deque<Waiting> waiting_;
  std::unordered_map<Blocks::Block*, std::vector<CUstream>> users_;  // of shared blocks
};

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

// The heap as torch's memory snapshot reads it.
//
// Guarantees: the result of one call was true at one moment.
//
// Lock: everything here takes the heap's.

// A stretch of blocks with no hole between them, with the owner and place of its pages.
struct Segment {
  BallonetSegment facts;
  std::vector<BallonetBlock> blocks;
  Owner owner = Owner::kActivations;
  Place place = Place::kDevice;
};

class HeapSnapshot {
 public:
  HeapSnapshot(std::mutex& heap, const Arenas& arenas, const LiveBlocks& live)
      : mutex_(heap), arenas_(arenas), live_(live) {}

  // Every segment and its blocks, in the order of their addresses, without those of ranges.
  std::vector<Segment> segments() const;
  std::vector<Segment> segments_locked() const;  // Pre: the caller holds the lock.
  // The block that is handed out at an address. False where none is.
  bool find(const void* address, BallonetBlock& out) const;
  std::uint64_t largest_free() const;

 private:
  std::mutex& mutex_;
  const Arenas& arenas_;
  const LiveBlocks& live_;
};

}  // namespace ballonet
