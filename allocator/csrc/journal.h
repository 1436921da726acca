// Who owned how many pages, and when: a ring of samples that costs a clock read per change and no memory beyond its
// size.
#pragma once

#include <array>
#include <cstdint>
#include <ctime>
#include <mutex>
#include <vector>

namespace ballonet {

class Journal {
 public:
  struct Sample {
    std::int64_t time_ns;  // CLOCK_MONOTONIC
    std::array<std::size_t, 5> pages;
  };

  // Changes closer together than this are one sample, the last.
  static constexpr std::int64_t kResolutionNs = 50'000;
  static constexpr std::size_t kCapacity = 1 << 16;

  void note(const std::array<std::size_t, 5>& pages) {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    const std::int64_t time_ns = now.tv_sec * 1'000'000'000LL + now.tv_nsec;
    std::lock_guard<std::mutex> lock(mutex_);
    if (count_ > 0 && time_ns - newest().time_ns < kResolutionNs) {
      newest().pages = pages;
      return;
    }
    if (ring_.size() < kCapacity) ring_.resize(kCapacity);
    ring_[next_] = {time_ns, pages};
    next_ = (next_ + 1) % kCapacity;
    if (count_ < kCapacity) ++count_;
  }

  // Takes the samples, oldest first; where more than the ring holds came, the oldest are gone.
  std::vector<Sample> drain() {
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<Sample> samples;
    samples.reserve(count_);
    for (std::size_t i = 0; i < count_; ++i) samples.push_back(ring_[(next_ + kCapacity - count_ + i) % kCapacity]);
    count_ = 0;
    return samples;
  }

 private:
  Sample& newest() { return ring_[(next_ + kCapacity - 1) % kCapacity]; }

  std::mutex mutex_;
  std::vector<Sample> ring_;
  std::size_t next_ = 0;
  std::size_t count_ = 0;
};

}  // namespace ballonet
