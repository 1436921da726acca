// Asks for a larger budget where device pages are lacking: a thread posts the number, a listener in Python answers.
//
// Note [Who raises a budget]
// Several processes may share one budget, of which each has a part as its own. An allocation that its part has no page
// for asks for more before anything is taken from models and caches of this process, and once more before it fails. The
// answer takes messages between processes, which are Python's, and an allocation may come with the interpreter's lock
// and with none. So a Python thread listens, and the asking thread waits without any lock, up to the listener's
// patience, and not in a stream capture. Without an answer it goes on as without a listener.
//
// Guarantees: no thread waits longer than the listener's patience; the listener does not wait for itself, nor does a
// child of a fork.
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
  // Begins to listen, or goes on: `most` pages may the budget become; with the patience of asking threads. 0: ends
  // listening, and who waits goes on without an answer.
  void listen(std::size_t most, std::int64_t patience_ns);
  // Pages that the budget may become; 0 without a listener.
  std::size_t most();
  // Asks for so many pages, or with 0 that the listener looks what the budget may become. Returns whether it was raised
  // since. `last`: nothing else helps; `wait`: is there time for that?
  bool ask(std::size_t missing, bool last, bool wait);
  // Waits until something is asked, or the time is up. Returns how many pages were asked for, and whether nothing else
  // helps. Only the listener calls it, and `answer` after it.
  std::pair<std::size_t, bool> heard(std::int64_t timeout_ns);
  // Answers all that was heard. `raised`: is the budget larger? Only the listener calls it.
  void answer(bool raised);

  // Runs a function that waits, without the interpreter's lock.
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
