// Events: the core's decisions when pages ran short, the newest ones (`Events`), and samples of who has them
// (`Journal`). Not used on the hit path.
//
// Guarantees: the newest events are kept, each once, in the order in which they ended.
//
// Lock: one of its own, under which nothing else is taken.
#pragma once

#include <pthread.h>

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

// Samples of pages by owner over time, the newest ones, at the cost of a clock read per change.
//
// Guarantees: the newest samples are kept, in their order; no two are closer together than the resolution.
//
// Lock: one of its own, under which nothing else is taken.

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

class Events {
 public:
  enum class Kind : std::uint8_t {
    kInflate,        // idle pages of the heap went to a range
    kDeflate,        // free pages went to the heap
    kTake,           // an entry gave its pages to a thread that needed some
    kYield,          // an entry gave its pages on request
    kRequest,        // pages are missing that only entries leased by other threads can give
    kSpill,          // blocks got host pages
    kUnspill,        // host pages that blocks lay on are given back
    kRefuse,         // pages were asked for, and nothing could give them
    kBudget,         // the budget is another
    kBudgetRefused,  // it could not be made this small
  };
  static constexpr const char* kNames[] = {"inflate", "deflate", "take",   "yield",  "request",
                                           "spill",   "unspill", "refuse", "budget", "budget refused"};
  static constexpr std::int64_t kNoKey = -1;

  struct Event {
    std::int64_t time_ns;  // CLOCK_MONOTONIC, when it began
    Kind kind;
    std::size_t pages;
    std::int64_t key;      // of the entry; of a budget: the pages of the one before
    std::uint64_t thread;  // pthread_self()
    std::int64_t ns;       // how long it took
  };

  // Adds an event that began at `since` and has just ended.
  void add(Kind kind, std::size_t pages, std::int64_t since = now_ns(), std::int64_t key = kNoKey) {
    const std::int64_t now = now_ns();
    std::lock_guard<std::mutex> lock(mutex_);
    if (events_.size() == tuning::kEventsKept) events_.pop_front();
    events_.push_back({since, kind, pages, key, static_cast<std::uint64_t>(pthread_self()), now - since});
  }

  // Takes the events, in the order in which they ended.
  std::deque<Event> drain() {
    std::lock_guard<std::mutex> lock(mutex_);
    return std::exchange(events_, {});
  }

 private:
  std::mutex mutex_;
  const HeldOverFork held_{ForkRank::kLast, mutex_};
  std::deque<Event> events_;
};

}  // namespace ballonet
