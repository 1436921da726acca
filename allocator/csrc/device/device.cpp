#include "device/device.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include "heap/exhausted.h"

namespace ballonet {

Device::Device(const Mapper::Options& options, bool spill)
    : mapper(std::make_shared<Mapper>(options)), reclaim(mapper), heap(mapper, reclaim, spill), asked_(options.budget) {
  mapper->background.start();
}

Device::~Device() {
  try {
    close();
  } catch (const std::exception&) {
    // Blocks are still in use, and a destructor cannot throw: the pages go with their ranges.
  }
  mapper->stop_background();
}

void Device::map(Range& range, std::size_t first, std::size_t count, Place place) {
  if (place == Place::kDevice) return with_idle_pages(count, [&] { mapper->map(range, first, count, place); });
  try {
    mapper->map(range, first, count, place);
  } catch (const PoolExhausted& reason) {
    if (place == Place::kPeer) throw;  // the caller falls back to the host
    mapper->events.add(Events::Kind::kRefuse, count);
    throw PoolExhausted(host_exhausted(*mapper, count, reason.what()));
  }
}

bool Device::own(Range& range, std::size_t first, std::size_t count) {
  return with_idle_pages(count, [&] { return mapper->aliasing.own(range, first, count); });
}

// Runs `attempt`, which needs so many device pages, again while the heap has idle ones to give, and then with reclaimed
// ones.
template <class Attempt>
auto Device::with_idle_pages(std::size_t pages, Attempt attempt) -> decltype(attempt()) {
  const auto with_idle = [&] {
    for (;;) {
      try {
        return attempt();
      } catch (const PoolExhausted& reason) {
        const std::int64_t since = now_ns();
        const std::size_t idle = heap.give(reason.missing);
        if (idle == 0) throw;
        mapper->events.add(Events::Kind::kInflate, idle, since);
      }
    }
  };
  try {
    return reclaim.supply(with_idle);
  } catch (const PoolExhausted& reason) {
    mapper->events.add(Events::Kind::kRefuse, pages);
    std::lock_guard<std::mutex> lock(heap.mutex);
    throw PoolExhausted(heap.exhausted(pages * mapper->space.page_size, reason.what(), reason.missing));
  }
}

void Device::set_budget(std::size_t bytes, std::int64_t wait_ns, const std::function<void()>& pause) {
  const std::size_t pages = bytes / mapper->space.page_size;
  const std::int64_t since = now_ns();
  if (pages < mapper->numbers().created) {
    if (const std::size_t fixed = immovable(); fixed > pages) {
      mapper->events.add(Events::Kind::kBudgetRefused, pages, since);
      throw BudgetInUse(fixed * mapper->space.page_size, bytes, 0);
    }
  }
  std::size_t ticket, before;
  {
    std::lock_guard<std::mutex> lock(budget_mutex_);
    if (!pending_) met_ = asked_;
    ticket = ++newest_;
    pending_ = true;
    before = met_;
    asked_ = pages;
    apply_budget();
  }
  try {
    shrink(pages, ticket, wait_ns < INT64_MAX - since ? since + wait_ns : INT64_MAX, pause);
  } catch (...) {
    std::lock_guard<std::mutex> lock(budget_mutex_);
    mapper->events.add(Events::Kind::kBudgetRefused, pages, since, static_cast<std::int64_t>(before));
    if (ticket == newest_) {
      pending_ = false;
      asked_ = met_;
      apply_budget();
    }
    throw;
  }
  mapper->events.add(Events::Kind::kBudget, pages, since, static_cast<std::int64_t>(before));
}

// Pre: the budget's lock is held.
void Device::apply_budget() {
  const auto allowed = static_cast<double>(mapper->space.context.total_memory / mapper->space.page_size) * fraction_;
  mapper->set_budget(fraction_ < 1.0 ? std::min(asked_, static_cast<std::size_t>(allowed)) : asked_);
}

void Device::set_fraction(double fraction) {
  {
    std::lock_guard<std::mutex> lock(budget_mutex_);
    fraction_ = fraction;
    heap.allow_spilling(fraction == 1.0);
    apply_budget();
  }
  heap.shrink(false);
}

double Device::fraction() {
  std::lock_guard<std::mutex> lock(budget_mutex_);
  return fraction_;
}

// Device pages that cannot be given back, or fewer: a page that its range has given back, and that another range still
// shows, is not counted, as that range may let it go in time.
std::size_t Device::immovable() {
  const std::size_t idle = heap.idle_pages(true);
  const Reclaim::Outlook entries = reclaim.outlook();
  const auto numbers = mapper->numbers();
  const auto pages = [&](Owner owner) { return numbers.pages[static_cast<std::size_t>(owner)]; };
  const std::size_t movable = pages(Owner::kFree) + pages(Owner::kRetiring) + idle + entries.ready + entries.leased;
  return numbers.created - std::min(numbers.created, movable);
}

// Waits until no more exists than the budget allows. Throws BudgetInUse once the time is up or another is asked for.
void Device::shrink(std::size_t pages, std::size_t ticket, std::int64_t deadline, const std::function<void()>& pause) {
  const std::int64_t since = now_ns();
  for (unsigned round = 0;; ++round) {
    heap.shrink(round == 0);
    if (!mapper->within_budget()) reclaim.shrink();
    const bool within = mapper->within_budget();
    {
      std::lock_guard<std::mutex> lock(budget_mutex_);
      if (within && ticket == newest_) {
        pending_ = false;
        return;
      }
      if (ticket != newest_ || now_ns() >= deadline) {
        const std::size_t page = mapper->space.page_size;
        throw BudgetInUse(mapper->numbers().created * page, pages * page, static_cast<double>(now_ns() - since) / 1e9);
      }
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(std::min(1 + round / 8, 5U)));
    if (round % 8 == 0) pause();
  }
}

std::size_t Device::trim() {
  const std::size_t before = mapper->numbers().pages[static_cast<std::size_t>(Owner::kActivations)];
  heap.trim_and_wait();
  const std::size_t after = mapper->numbers().pages[static_cast<std::size_t>(Owner::kActivations)];
  mapper->release_free();
  return (before > after ? before - after : 0) * mapper->space.page_size;
}

void Device::close() {
  if (closed_) return;
  const std::size_t live = heap.close();
  if (live > 0)
    throw UsageError(format("%zu blocks are still in use: drop the tensors that were made under ballonet first", live));
  mapper->shutdown();
  mapper->stop_background();
  closed_ = true;
}

std::pair<Mapper::Numbers, Heap::Numbers> Device::numbers() {
  std::lock_guard<std::mutex> lock(heap.mutex);
  return {mapper->numbers(), heap.numbers_locked()};
}

void Device::check() {
  heap.check();
  mapper->check();
  reclaim.check();
}

}  // namespace ballonet
