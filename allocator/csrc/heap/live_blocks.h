// The blocks that are handed out, and those given back that wait until other streams have passed.
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

#include "heap/address_map.h"
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

}  // namespace ballonet
