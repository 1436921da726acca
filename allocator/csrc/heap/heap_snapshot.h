// The heap as torch's memory snapshot reads it.
//
// Guarantees: the result of one call was true at one moment.
//
// Lock: everything here takes the heap's.
#pragma once

#include <mutex>
#include <vector>

#include "heap/live_blocks.h"

namespace ballonet {

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
