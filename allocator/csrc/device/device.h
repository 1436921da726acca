// The assembly: one device is a mapper (driver, pools, streams, page tables), the list of what may be reclaimed of it,
// and a heap above them. Work that crosses them is here: where a range finds no page the heap gives up idle ones, and
// then published entries are taken; so it is for a budget that shrinks.
//
// Note [Lowering the budget]
// The budget is lowered first, so that nothing is created above it meanwhile, and it is met as an allocation would be:
// free pages, idle ones, entries of the list in their order, a request for those that other threads lease. Nothing
// tells when a lease ends, a stream passes or a block is freed, so the waiting thread looks again every few
// milliseconds, and takes what it may take by then. That includes all that it leases itself, so two threads never wait
// for each other. It holds no lock while it waits: of several budgets that are asked for at the same time, also on one
// thread, by a signal's handler, the newest counts. Those before it fail, and so does the newest when its time is up:
// then the budget is again what it was before the first of them.
//
// Guarantees: a failure changes nothing, the budget included.
//
// Lock: each function takes the locks that it needs; no caller holds a lock of the core.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "heap/heap.h"
#include "reclaim/reclaim.h"

namespace ballonet {

class Device {
 public:
  // `spill`: see Note [Spilling] in block_supply.h.
  explicit Device(const Mapper::Options& options, bool spill = false);
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  // Mapper::map, repeated with as many idle pages of the heap as are lacking, and then with reclaimed ones. Throws
  // PoolExhausted with a message for the user.
  void map(Range& range, std::size_t first, std::size_t count, Place place);
  // Aliasing::own in the same way.
  bool own(Range& range, std::size_t first, std::size_t count);
  // Sets the budget, in bytes. Returns when no more exists, the rest being back with the driver. Where that cannot be,
  // or is not so after `wait_ns`, the former budget is in force and BudgetInUse is thrown; where it is clear from the
  // beginning, nothing was taken either. Throws DriverError too, and what `pause` throws, which is called now and then
  // while it waits. Pre: the caller holds no lock.
  void set_budget(std::size_t bytes, std::int64_t wait_ns = 0, const std::function<void()>& pause = [] {});
  // torch's empty_cache: idle pages go back to the pool, and free ones to the driver.
  std::size_t trim();
  // Throws UsageError while blocks are live or ranges open.
  void close();
  void check();
  // No page is created beyond this share of the device's memory, whatever the budget is. What exists above it goes back
  // to the driver as it is given back; nothing is taken away. Pre: 0 <= fraction <= 1.
  void set_fraction(double fraction);
  double fraction();

  // In torch's words: see Note [What the numbers mean here] in device.cpp.
  BallonetStats stats();
  void reset_peaks();
  void reset_accumulated();
  std::pair<std::size_t, std::size_t> memory_info();  // free bytes, and all
  std::vector<Segment> segments();

  // Taken together: no allocation comes in between.
  std::pair<Mapper::Numbers, Heap::Numbers> numbers();

  const std::shared_ptr<Mapper> mapper;
  Reclaim reclaim;
  Heap heap;

 private:
  std::size_t immovable();
  void apply_budget();
  void shrink(std::size_t pages, std::size_t ticket, std::int64_t deadline, const std::function<void()>& pause);
  template <class Attempt>
  auto with_idle_pages(std::size_t pages, Attempt attempt) -> decltype(attempt());

  bool closed_ = false;
  std::mutex budget_mutex_;  // before the mapper's
  const HeldOverFork held_{ForkRank::kBudget, budget_mutex_};
  std::size_t newest_ = 0;  // how many budgets were asked for
  bool pending_ = false;    // the newest is not met yet
  std::size_t asked_;       // pages of the newest
  std::size_t met_ = 0;     // of the last one that was met, while one is pending
  double fraction_ = 1.0;
  std::mutex since_mutex_;  // a leaf
  const HeldOverFork since_held_{ForkRank::kLast, since_mutex_};
  Heap::Numbers since_{};  // when torch's totals were last reset
  unsigned long long created_since_ = 0, released_since_ = 0;
};

}  // namespace ballonet
