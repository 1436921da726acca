// Device pages that are lacking because of the budget: who lacks them asks whoever can raise it, and waits for the
// answer.
//
// Note [Who raises a budget]
// Several processes may share one budget, of which each has a part as its own. An allocation that its part has no page
// for asks for more before anything is taken from models and caches of this process, and once more before it fails. The
// answer takes messages between processes, which are Python's, and an allocation may come with the interpreter's lock
// and with none. So a thread of Python listens, and who asks waits without any lock, as long as was said when that
// began to listen, and not in a stream capture. Whoever gets no answer goes on as if there were no such thing.
//
// Guarantees: nobody waits longer than the listener's patience, nor the listener for itself, nor a child of a fork.
//
// Lock: its own, a leaf. Pre of `ask`: the caller holds no lock of the core.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

#include "base/fork.h"

namespace ballonet {

class Shortage {
 public:
  // Somebody will hear what is asked, for which it is waited so long; the budget may become `most` pages. 0: no more.
  void listen(std::size_t most, std::int64_t patience_ns);
  // Pages that the budget may become; 0 where nobody listens.
  std::size_t most();
  // So many pages are lacking. Returns whether the budget was raised since. `last`: nothing else helps; `wait`: is
  // there time for that?
  bool ask(std::size_t missing, bool last, bool wait);
  // Waits for pages to be asked for, or until the time is up: how many were since, and whether any were for want of all
  // else. Only the listener calls it.
  std::pair<std::size_t, bool> heard(std::int64_t timeout_ns);
  // Says that all that was heard is done; the listener does. `raised`: is the budget larger?
  void answer(bool raised);

  // Does what waits without the interpreter's lock.
  static std::function<void(const std::function<void()>&)> apart;

 private:
  std::mutex mutex_;
  const HeldOverFork held_{ForkRank::kLast, mutex_};
  std::condition_variable asked_, answered_;
  std::size_t most_ = 0, missing_ = 0;
  std::int64_t patience_ns_ = 0;
  std::uint64_t posted_ = 0, taken_ = 0, done_ = 0;  // questions so far; of them heard, and answered
  bool raised_ = false, last_ = false;
  unsigned forks_ = 0;
  std::thread::id listener_{};
};

}  // namespace ballonet
