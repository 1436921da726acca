// Samples of pages by owner over time, the newest ones, at the cost of a clock read per change.
//
// Guarantees: the newest samples are kept, in their order; no two are closer together than the resolution.
//
// Lock: one of its own, under which nothing else is taken.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <mutex>
#include <utility>

#include "base/clock.h"
#include "base/fork.h"
#include "base/tuning.h"
#include "pages/page.h"

namespace ballonet {

class Journal {
 public:
  struct Sample {
    std::int64_t time_ns;  // CLOCK_MONOTONIC
    std::array<std::size_t, kOwners> pages;
  };

  void note(const std::array<std::size_t, kOwners>& pages) {
    const std::int64_t time_ns = now_ns();
    std::lock_guard<std::mutex> lock(mutex_);
    if (!samples_.empty() && time_ns - samples_.back().time_ns < tuning::kSampleNs) {
      samples_.back().pages = pages;
      return;
    }
    if (samples_.size() == tuning::kSamplesKept) samples_.pop_front();
    samples_.push_back({time_ns, pages});
  }

  // Takes the samples, oldest first; where more came than are kept, the oldest are gone.
  std::deque<Sample> drain() {
    std::lock_guard<std::mutex> lock(mutex_);
    return std::exchange(samples_, {});
  }

 private:
  std::mutex mutex_;
  const HeldOverFork held_{ForkRank::kLast, mutex_};
  std::deque<Sample> samples_;
};

}  // namespace ballonet
