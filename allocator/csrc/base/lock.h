// A lock that knows who holds it, and how it is let go of for a while.
//
// Lock: none is wanted; `held` may be asked by any thread.
#pragma once

#include <atomic>
#include <mutex>
#include <thread>

namespace ballonet {

// What has to run under it says so with `assert(mutex.held())`, which a build with asserts checks.
class Mutex {
 public:
  void lock() {
    mutex_.lock();
    holder_.store(std::this_thread::get_id(), std::memory_order_relaxed);
  }
  void unlock() {
    holder_.store(std::thread::id{}, std::memory_order_relaxed);
    mutex_.unlock();
  }
  // By the calling thread.
  bool held() const { return holder_.load(std::memory_order_relaxed) == std::this_thread::get_id(); }
  std::mutex& over_fork() { return mutex_; }  // see HeldOverFork

 private:
  std::mutex mutex_;
  std::atomic<std::thread::id> holder_{};
};

// While it lives, the lock is released.
template <class Held>
class Unlocked {
 public:
  explicit Unlocked(Held& lock) : lock_(lock) { lock_.unlock(); }
  ~Unlocked() { lock_.lock(); }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  Held& lock_;
};

}  // namespace ballonet
