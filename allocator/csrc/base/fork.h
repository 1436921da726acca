// Locks that a fork takes first, so that it finds nothing half done.
//
// Note [Locks over a fork]
// The child of a fork has the forking thread alone: a lock that another one held stays locked there for ever. So a fork
// takes all locks that its child may need first, in the order in which they nest, and gives them back on both sides.
// A driver's library may do the same with its own locks, which lie below ours; as the newest handlers run first, ours
// are registered anew whenever a library was loaded.
//
// Guarantees: in the child all these locks are free, and what they protect is as a thread left it that held none.
//
// Lock: one of its own for the list of locks; a fork takes it first.
#pragma once

#include <atomic>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

namespace ballonet {

// A lock that knows who holds it, and how it is let go of for a while.
//
// Lock: none needed; any thread may call `held`.

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

// In the order in which they are taken.
enum class ForkRank { kRegistry, kBudget, kHeap, kReclaim, kGroup, kScratch, kThreads, kMapper, kRequests, kLast };
// kLast: nothing else is taken under these.

// While it lives, a fork takes the lock. `before` runs in the parent ahead of the fork, once every lock is held; it
// throws nothing.
class HeldOverFork {
 public:
  HeldOverFork(ForkRank rank, std::mutex& mutex, std::function<void()> before = {});
  ~HeldOverFork();
  HeldOverFork(const HeldOverFork&) = delete;
  HeldOverFork& operator=(const HeldOverFork&) = delete;

 private:
  const ForkRank rank_;
  std::mutex& mutex_;
};

// Installs the fork handlers anew, after those of `library`, whose locks lie below ours. Throws UsageError.
void watch_forks(const std::string& library);
// How many forks lie between this process and the one that loaded the core: a thread that was started before the last
// of them does not exist here.
unsigned forks();

}  // namespace ballonet
