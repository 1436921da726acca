// A lock that knows who holds it, and how it is let go of for a while.
//
// Lock: none needed; any thread may call `held`.
#pragma once

#include <atomic>
#include <mutex>
#include <thread>

namespace ballonet {

// Code that must run under it has `assert(mutex.held())`, which a build with asserts checks.
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
  // Does the calling thread hold it?
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
