#include "heap/block_supply.h"

#include <algorithm>

#include "base/tuning.h"
#include "heap/heap_report.h"

namespace ballonet {

std::atomic<void (*)()> BlockSupply::on_spill{nullptr};

Blocks::Block* BlockSupply::find(HeapLock& lock, const ArenaKey& key, std::uint64_t size, Arena*& arena) {
  live_.free_passed();
  std::string reason = "It exceeds the whole budget";
  std::size_t missing = 0;
  const auto may_fit = [&] { return size <= std::max(mapper_.numbers().budget, reclaim_.shortage.most()) * page_; };
  if (!may_fit()) {  // what is shared may be more by now
    Unlocked unlocked(lock);
    reclaim_.shortage.ask(0, false, !mapper_.fences.capturing());
  }
  if (may_fit()) {
    try {
      return fit(lock, key, size, arena);
    } catch (const DriverError& error) {
      if (cuda::is_sticky(error.code))
        throw;  // no memory repairs that; else a call that failed once deserves a second try
    } catch (const PoolExhausted&) {
      // It is tried again with all that can be had, and then with what can be reclaimed.
    }
    ++counts_.retries;
    try {
      return fit_with_reclaimed(lock, key, size, arena);
    } catch (const PoolExhausted& error) {
      reason = error.what();
      missing = error.missing;
    } catch (const DriverError& error) {
      if (cuda::is_sticky(error.code)) throw;
      reason = error.what();
    }
  }
  if (Blocks::Block* block = pools_.lent(key, size, arena)) return block;
  if (Blocks::Block* block = spill(lock, key, size, arena, reason)) return block;
  ++counts_.refusals;
  mapper_.events.add(Events::Kind::kRefuse, (size + page_ - 1) / page_);
  throw PoolExhausted(exhausted(mapper_, report_.usage, size, reason, missing));
}

// A free block to cut `size` from, backed for it where there is none. Where pages are on their way out of other blocks
// it makes others (heap_pages.h, Note [Growing]), or waits for them without the lock, and looks for a place anew.
Blocks::Block* BlockSupply::fit(HeapLock& lock, const ArenaKey& key, std::uint64_t size, Arena*& arena) {
  bool may_harvest = true;
  for (int waits = 0;; ++waits) {
    Arenas::List& arenas = arenas_.of(key);
    Blocks::Placement placement;
    for (auto& candidate : arenas) {
      arena = candidate.get();
      if (Blocks::Block* block = arena->blocks.best_fit(size)) return block;
      placement = arena->blocks.place(size);
      if (placement.hole != nullptr) break;
    }
    if (placement.hole == nullptr) {
      arena = &arenas_.add(arenas, key, size);
      placement = arena->blocks.place(size);
    }
    try {
      if (pages_.back(*arena, placement, may_harvest && waits < tuning::kWaitsForPages))
        return arena->blocks.best_fit(size);
      mapper_.reap(false);
      may_harvest = mapper_.retiring() == 0 || !pages_.may_outgrow(placement);
      if (!may_harvest) continue;
    } catch (const PoolExhausted&) {
      if (waits >= tuning::kWaitsForPages || mapper_.retiring() == 0 || mapper_.fences.capturing()) throw;
    }
    Unlocked unlocked(lock);
    mapper_.reap(true);
  }
}

// The same, and while pages are lacking as many of those that lie idle are given up: the others stay mapped, for what
// is allocated next.
Blocks::Block* BlockSupply::fit_with_idle(HeapLock& lock, const ArenaKey& key, std::uint64_t size, Arena*& arena) {
  for (;;) {
    try {
      return fit(lock, key, size, arena);
    } catch (const PoolExhausted& reason) {
      if (mapper_.fences.capturing() || give_up_idle(lock, std::max<std::size_t>(reason.missing, 1)) == 0) throw;
    }
  }
}

// The lock is held while a place is looked for, and not while something is taken for it.
Blocks::Block* BlockSupply::fit_with_reclaimed(HeapLock& lock, const ArenaKey& key, std::uint64_t size, Arena*& arena) {
  Blocks::Block* found = nullptr;
  lock.unlock();
  try {
    reclaim_.supply([&] {
      lock.lock();
      try {
        found = fit_with_idle(lock, key, size, arena);
      } catch (...) {
        lock.unlock();
        throw;
      }
    });
  } catch (...) {
    lock.lock();
    throw;
  }
  return found;  // with the lock, so that it still is free
}

// A free block on host pages, or nullptr; `reason` then says why, where that is not for lack of permission.
Blocks::Block* BlockSupply::spill(HeapLock& lock, const ArenaKey& key, std::uint64_t size, Arena*& arena,
                                  std::string& reason) {
  if (!spill_ || limited_ || key.pooled() || mapper_.fences.capturing()) return nullptr;
  if (!mapper_.space.context.host_pages) {
    reason += ". Nor can it lie on the host: " + mapper_.space.context.host_refused;
    return nullptr;
  }
  if (size > mapper_.numbers().host_budget * page_) {
    reason += ". Nor does it fit on the host";
    return nullptr;
  }
  const ArenaKey host{key.stream, key.pool, key.small, Place::kHost};
  {
    Unlocked unlocked(lock);
    mapper_.mapping.prepare_host((size + page_ - 1) / page_);
  }
  for (int attempt = 0; attempt < 2; ++attempt) {  // a driver call that failed once deserves a second try
    try {
      Blocks::Block* block = fit(lock, host, size, arena);
      if (void (*tell)() = on_spill.exchange(nullptr)) tell();
      return block;
    } catch (const PoolExhausted& error) {
      reason += std::string(". Nor has the host room for it: ") + error.what();
      return nullptr;
    } catch (const DriverError& error) {
      if (cuda::is_sticky(error.code)) throw;
      if (attempt > 0) reason += std::string(". Nor could it lie on the host: ") + error.what();
    }
  }
  return nullptr;
}

std::size_t BlockSupply::give_up_idle(HeapLock& lock, std::size_t pages) {
  ++counts_.waits;
  live_.wait_freed(lock);
  const std::size_t given = pages_.harvest(pages);
  Unlocked unlocked(lock);
  mapper_.reap(true);
  return given;
}

}  // namespace ballonet
