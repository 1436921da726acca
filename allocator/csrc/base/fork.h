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

#include <functional>
#include <mutex>
#include <string>

namespace ballonet {

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
