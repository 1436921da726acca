// A group: ranges that are leased together, such as the weights of one model or one KV cache.
//
// Note [Leases]
// From entry to exit of a forward its thread holds a lease on what the forward uses, even before its kernels are
// launched: a fence cannot know of work that the CPU has not submitted yet. A page of the group may move only while
// every lease belongs to the thread that moves it. The thread that moves it holds the group's lock throughout, so that
// no lease begins in the middle.
//
// Guarantees: while `mutex` is held no lease begins or ends.
//
// Lock: `mutex`, before the mapper's; leases take it themselves.
#pragma once

#include <pthread.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>

#include "base/errors.h"

namespace ballonet {

// A lock that a fork takes, for as long as this lives. A group may end under any lock, and then no longer wait for a
// fork that has begun; so locks are lent, and outlive their borrowers.
class LentMutex {
 public:
  LentMutex();
  ~LentMutex();
  LentMutex(const LentMutex&) = delete;
  LentMutex& operator=(const LentMutex&) = delete;

  std::mutex& get;
};

class Group {
 public:
  void enter() {
    std::lock_guard<std::mutex> lock(mutex);
    ++leases_[pthread_self()];
  }

  // `thread`: who entered, where it is not the caller.
  void leave(pthread_t thread = pthread_self()) {
    std::lock_guard<std::mutex> lock(mutex);
    const auto mine = leases_.find(thread);
    if (mine == leases_.end()) throw UsageError("this thread holds no lease on the group");
    if (--mine->second == 0) leases_.erase(mine);
  }

  std::size_t leases() {
    std::lock_guard<std::mutex> lock(mutex);
    std::size_t sum = 0;
    for (const auto& [thread, count] : leases_) sum += count;
    return sum;
  }

  // Pre: the caller holds `mutex`.
  bool leased_by_others() const {
    for (const auto& [thread, count] : leases_) {
      if (pthread_equal(thread, pthread_self()) == 0) return true;
    }
    return false;
  }

  // Tensors over ranges of the group that are gone: when it has not moved, none has lost its memory.
  std::atomic<std::uint64_t> unpinned{0};

 private:
  const LentMutex lent_;

 public:
  std::mutex& mutex = lent_.get;

 private:
  std::map<pthread_t, std::size_t> leases_;
};

}  // namespace ballonet
