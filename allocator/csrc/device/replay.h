// Drives a heap with a recorded trace, for `ballonet replay`.
//
// Guarantees: all that it allocated is freed, also after a failure.
//
// Lock: none is wanted; it calls the heap as torch does.
#pragma once

#include <string_view>
#include <vector>

#include "device/device.h"

namespace ballonet {

struct Replayed {
  std::uint64_t peak_live;              // largest sum of requested bytes
  std::uint64_t peak_physical;          // largest number of bytes that existed
  std::vector<std::uint64_t> physical;  // the same in each of some equal parts of the operations
  std::uint64_t driver_calls;           // while replaying
  std::uint64_t ops;
  double ns_per_op;
};

// Rows of 32 bytes, little-endian: op (1 = alloc, 2 = free) in the first, then id, size and stream at 8, 16 and 24. A
// free whose id is not live is skipped. `parts`: of `physical`, at most. Pre: no block of the device is live. Throws
// UsageError, PoolExhausted.
Replayed replay(Device& device, std::string_view rows, std::size_t parts);

}  // namespace ballonet
