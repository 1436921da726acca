// What torch's statistics count of the heap: levels with their peaks and their totals.
#pragma once

#include <algorithm>
#include <cstdint>

namespace ballonet {

struct Level {
  std::uint64_t current = 0, peak = 0;
  std::uint64_t added = 0, removed = 0;  // since the process started

  void add(std::uint64_t amount) {
    current += amount;
    added += amount;
    peak = std::max(peak, current);
  }
  void remove(std::uint64_t amount) {
    current -= amount;
    removed += amount;
  }
};

// What is counted of the blocks of one size class, or of all.
struct Usage {
  Level blocks, bytes, requested;     // handed out
  Level active_blocks, active_bytes;  // these, and what was given back and waits for streams
  Level mapped;                       // bytes of device pages under free and live blocks

  void allocated(std::uint64_t size, std::uint64_t asked) {
    blocks.add(1);
    bytes.add(size);
    requested.add(asked);
    active_blocks.add(1);
    active_bytes.add(size);
  }
  void freed(std::uint64_t size, std::uint64_t asked) {
    blocks.remove(1);
    bytes.remove(size);
    requested.remove(asked);
  }
  void passed(std::uint64_t size) {
    active_blocks.remove(1);
    active_bytes.remove(size);
  }
  void reset_peaks() {
    for (Level* level : {&blocks, &bytes, &requested, &active_blocks, &active_bytes, &mapped})
      level->peak = level->current;
  }
};

}  // namespace ballonet
