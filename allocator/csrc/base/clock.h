// The one clock: events, samples and durations can be compared, also with Python's time.monotonic_ns().
//
// Lock: none.
#pragma once

#include <cstdint>
#include <ctime>

namespace ballonet {

inline std::int64_t now_ns() {  // CLOCK_MONOTONIC
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1'000'000'000LL + now.tv_nsec;
}

}  // namespace ballonet
