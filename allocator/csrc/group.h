// A group: ranges that are leased together, such as the weights of one model or one KV cache.
//
// Note [Leases]
// From entry to exit of a forward its thread holds a lease on what the forward uses, even before its kernels are
// launched: a fence cannot know of work that the CPU has not submitted yet. A page of the group may move only while
// every lease belongs to the thread that moves it. Whoever moves holds the group's lock throughout, so that no lease
// begins in the middle.
#pragma once

#include <map>
#include <mutex>
#include <thread>

#include "errors.h"

namespace ballonet {

class Group {
 public:
  void enter() {
    std::lock_guard<std::mutex> lock(mutex);
    ++leases_[std::this_thread::get_id()];
  }

  void leave() {
    std::lock_guard<std::mutex> lock(mutex);
    const auto mine = leases_.find(std::this_thread::get_id());
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
      if (thread != std::this_thread::get_id()) return true;
    }
    return false;
  }

  std::mutex mutex;

 private:
  std::map<std::thread::id, std::size_t> leases_;
};

}  // namespace ballonet
