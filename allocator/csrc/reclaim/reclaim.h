// The reclaim list: what may be taken when pages run out, in order, published ahead of time by the manager.
//
// Note [One trigger]
// An allocation can fail inside any operator, on any thread, with or without the interpreter's lock. So the manager is
// not asked then: it has published what may be taken. A thread that finds no page, once free blocks are trimmed and
// retirements reaped, takes entries in their order until there are enough. It knows nothing about an entry; the
// manager reads afterwards, from `taken`, which were.
//
// Note [Demand]
// An entry whose group another thread leases is in use, even where nothing of it runs at the moment. Pages missing for
// want of such entries are posted as a request, and the asking thread goes without. The thread with the lease sees it
// at its next layer boundary and takes the entries itself. A request that all entries together could not meet takes
// none.
//
// Note [Divisible]
// Pages of KV go one by one, the oldest of all layers first, and a cache has thousands. So an entry may be divisible:
// its parts are runs of pieces, one or two per layer, and a thread takes as many as it needs, from the parts in turns.
// Then a change of one piece says nothing of the others: changed pieces are passed over one by one, and the entry
// stays.
//
// Guarantees: nothing that another thread leases is taken, nor an entry that has changed since it was published.
//
// Lock: `mutex`. Order: the heap's, this, a group's, the mapper's. Public functions take it; private ones need it held.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "base/fork.h"
#include "mapping/mapper.h"

namespace ballonet {

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

class Reclaim {
 public:
  struct Entry {
    std::int64_t key;
    Takeable takeable;
    std::optional<std::size_t> limit;  // of a divisible entry: device pages that it gives yet
  };
  struct Event {
    std::int64_t time_ns;  // CLOCK_MONOTONIC
    std::int64_t key;
    std::size_t pages;
  };

  explicit Reclaim(std::shared_ptr<Mapper> mapper) : mapper_(std::move(mapper)) {}

  // Replaces the list; entries that are void already are left out. Throws UsageError with the old one in place.
  void publish(std::vector<Entry> entries);
  // Removes entries. Waits for one that is being taken.
  void withdraw(const std::vector<std::int64_t>& keys);
  // The keys on the list, in order. Void entries are removed when they are looked at.
  std::vector<std::int64_t> keys();
  // Takes the events, oldest first.
  std::deque<Event> taken();
  // Device pages that entries have given so far.
  std::size_t pages() const { return pages_.load(std::memory_order_relaxed); }

  // Calls `attempt` again for as long as it throws PoolExhausted and the budget was raised since, or entries give what
  // it misses. Rethrows its error, or DriverError where that kept entries from helping. Pre: the caller holds no lock
  // of the core.
  template <class Attempt>
  auto supply(Attempt attempt) -> decltype(attempt()) {
    for (;;) {
      const std::size_t before = pages(), raises = mapper_->raises();
      try {
        return attempt();
      } catch (const PoolExhausted& reason) {
        if (is_raised(reason, false) || meet(reason, before) || is_raised(reason, true)) continue;
        if (mapper_->raises() == raises) throw;
      }
    }
  }
  struct Outlook {
    std::size_t ready = 0;   // device pages that entries can give now
    std::size_t leased = 0;  // those of entries that other threads lease
  };
  Outlook outlook();
  // Takes entries until no more pages exist than the budget allows, as far as they can help. Throws DriverError.
  void shrink();
  // Pages that are wanted and that only entries leased by other threads can give; 0 once they are had otherwise.
  std::size_t page_request();
  // Is anything requested, as far as can be told without waiting?
  bool is_requested() const { return requested_.load(std::memory_order_relaxed); }
  // Takes for the request the entries that the calling thread may take; returns the pages. The rest stays requested of
  // other threads. Throws DriverError.
  std::size_t yield_pages();
  // Takes those of these entries that the calling thread may take now, of divisible ones until there are so many pages;
  // returns the pages. Throws DriverError.
  std::size_t take(const std::vector<std::int64_t>& keys, std::size_t pages = ~std::size_t{0});
  // Throws InvariantBroken.
  void check();

  std::mutex mutex;
  Shortage shortage;

 private:
  // Asks for a larger budget for the missing pages; was it raised? `last`: nothing else helps.
  bool is_raised(const PoolExhausted& reason, bool last);
  // Is it worth another attempt? `before`: what entries had given when the last one began.
  bool meet(const PoolExhausted& reason, std::size_t before);
  // In their order, until so many pages are ready; as many as the host has room for.
  Outlook look(std::size_t enough);
  void request_pages(std::size_t wanted, std::size_t missing);
  std::size_t take(std::size_t wanted, std::size_t missing, bool all_or_none, Events::Kind kind);
  std::size_t take_some(std::size_t missing, Events::Kind kind, const std::function<bool(const Entry&)>& chosen);
  Taken take_one(Entry& entry, std::size_t missing, std::exception_ptr& failed);
  Taken outlook_of(const Entry& entry, std::size_t enough, const Room& room);

  const HeldOverFork held_{ForkRank::kReclaim, mutex};
  const std::shared_ptr<Mapper> mapper_;
  std::vector<Entry> entries_;
  std::deque<Event> events_;
  std::atomic<std::size_t> pages_{0};
  std::size_t wanted_ = 0;  // what the request is for: this many pages that can be had
  std::atomic<bool> requested_{false};
};

}  // namespace ballonet
