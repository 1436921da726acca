#include "heap.h"

#include <algorithm>

namespace ballonet {

std::atomic<void (*)()> Heap::on_spill{nullptr};

Heap::Heap(std::shared_ptr<Mapper> mapper, Reclaim& reclaim, bool spill)
    : mapper_(std::move(mapper)), reclaim_(reclaim), spill_(spill), page_(mapper_->space.page_size) {}

void* Heap::allocate(std::size_t size, CUstream stream) {
  Lock lock(mutex);
  if (size > kLargest) throw PoolExhausted(exhausted(size, "No device has as much memory as that"));
  const std::uint64_t wanted = Blocks::rounded(size);
  const CUstream owner = Streams::of_all_threads(stream);
  const Key key{owner, filling_.empty() ? MempoolId{} : pool_for(stream), wanted < kSmall};
  Arenas& arenas = arenas_for(key);
  Arena* arena = nullptr;
  Blocks::Block* block = best_fit(arenas, wanted, arena);
  if (block == nullptr) {
    block = allocate_slow(lock, key, wanted, arena);
  } else {
    ++hits_;
  }
  block = arena->blocks.take(block, wanted);
  void* const address = hand_out(*arena, block, size);
  if (is_per_thread(stream)) use_on(block, owner);
  return address;
}

Blocks::Block* Heap::best_fit(Arenas& arenas, std::uint64_t size, Arena*& arena) {
  Blocks::Block* block = nullptr;
  for (auto candidate = arenas.begin(); candidate != arenas.end() && block == nullptr; ++candidate) {
    arena = candidate->get();
    block = arena->blocks.best_fit(size);
  }
  return block;
}

// A block that was cut for `requested` bytes becomes a live one.
void* Heap::hand_out(Arena& arena, Blocks::Block* block, std::uint64_t requested) {
  block->requested = requested;
  block->tag = &arena;
  const std::uint64_t address = arena.range->base + block->offset;
  live_.insert(address, block);
  usage_.allocated(arena.key.small, block->size, requested);
  return reinterpret_cast<void*>(address);
}

bool Heap::deallocate(void* address) {
  std::lock_guard<std::mutex> lock(mutex);
  Blocks::Block* block = live_.erase(reinterpret_cast<std::uint64_t>(address));
  if (block == nullptr) return false;
  take_back(block);
  if (mapper_->space.device.above_budget()) give_back();
  return true;
}

// A block that is no longer among the live ones becomes free, at once or when it has passed on its streams.
void Heap::take_back(Blocks::Block* block) {
  usage_.freed(static_cast<Arena*>(block->tag)->key.small, block->size, block->requested, block->shared);
  if (!block->shared) return release(block);
  const auto users = users_.find(block);
  waiting_.push_back({mapper_->fences.over(users->second), block});
  users_.erase(users);
}

void Heap::record_stream(void* address, CUstream stream) {
  std::lock_guard<std::mutex> lock(mutex);
  Blocks::Block* block = live_.find(reinterpret_cast<std::uint64_t>(address));
  const CUstream user = Streams::of_all_threads(stream);
  if (block == nullptr || (static_cast<Arena*>(block->tag)->key.stream == user && !is_per_thread(stream))) return;
  use_on(block, user);
}

// The block is reused only once the stream's present work has passed when it is freed.
void Heap::use_on(Blocks::Block* block, CUstream stream) {
  std::vector<CUstream>& users = users_[block];
  if (std::find(users.begin(), users.end(), stream) != users.end()) return;
  users.push_back(stream);
  block->shared = true;
  mapper_->fences.note_stream(stream);
}

std::size_t Heap::block_size(void* address) {
  std::lock_guard<std::mutex> lock(mutex);
  const Blocks::Block* block = live_.find(reinterpret_cast<std::uint64_t>(address));
  return block == nullptr ? 0 : block->size;
}

Heap::Arenas& Heap::arenas_for(const Key& key) {
  const unsigned hot = key.small ? 1 : 0;
  if (hot_[hot] != nullptr && hot_key_[hot] == key) return *hot_[hot];
  const auto [found, fresh] = arenas_.try_emplace(key);
  if (fresh) mapper_->fences.note_stream(key.stream);
  hot_key_[hot] = key;
  hot_[hot] = &found->second;
  return found->second;
}

// Addresses for twice what the device has: a block must find a place whatever lies around it. Some virtual GPUs refuse
// large reservations, so smaller ones are tried before giving up.
Heap::Arena& Heap::add_arena(Arenas& arenas, const Key& key, std::uint64_t size) {
  const std::uint64_t least = (size + page_ - 1) / page_ + 1;
  for (std::uint64_t pieces = std::max(least, 2 * mapper_->space.context.total_memory / page_);;
       pieces = std::max(least, pieces / 4)) {
    try {
      auto range = mapper_->reserve(pieces, Owner::kActivations, nullptr);
      return *arenas.emplace_back(std::make_unique<Arena>(this, key, std::move(range), page_));
    } catch (const DriverError&) {
      if (pieces == least) throw;
    }
  }
}

MempoolId Heap::pool_for(CUstream stream) const {
  for (const auto& [pool, filter] : filling_) {
    if (filter(stream)) return pool;
  }
  return {};
}

Blocks::Block* Heap::allocate_slow(Lock& lock, const Key& key, std::uint64_t size, Arena*& arena) {
  reuse_passed();
  std::string reason = "It exceeds the whole budget";
  std::size_t missing = 0;
  if (size <= mapper_->numbers().budget * page_) {
    try {
      return fit(lock, key, size, arena);
    } catch (const DriverError& error) {
      if (is_sticky(error.code)) throw;  // no memory repairs that; else a call that failed once deserves a second try
    } catch (const PoolExhausted&) {
      // It is tried again with all that can be had, and then with what can be reclaimed.
    }
    ++retries_;
    try {
      if (!mapper_->fences.capturing()) settle(lock);
      return fit_with_reclaimed(lock, key, size, arena);
    } catch (const PoolExhausted& error) {
      reason = error.what();
      missing = error.missing;
    } catch (const DriverError& error) {
      if (is_sticky(error.code)) throw;
      reason = error.what();
    }
  }
  if (Blocks::Block* block = fallback(key, size, arena)) return block;
  if (Blocks::Block* block = spill(lock, key, size, arena, reason)) return block;
  ++refusals_;
  mapper_->events.add(Events::Kind::kRefuse, (size + page_ - 1) / page_);
  throw PoolExhausted(exhausted(size, reason, missing));
}

// The lock is held while a place is looked for, and not while something is taken for it.
Blocks::Block* Heap::fit_with_reclaimed(Lock& lock, const Key& key, std::uint64_t size, Arena*& arena) {
  Blocks::Block* found = nullptr;
  lock.unlock();
  try {
    reclaim_.supply([&] {
      lock.lock();
      try {
        found = fit(lock, key, size, arena);
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
Blocks::Block* Heap::spill(Lock& lock, const Key& key, std::uint64_t size, Arena*& arena, std::string& reason) {
  if (!spill_ || limited_ || !(key.pool == MempoolId{}) || mapper_->fences.capturing()) return nullptr;
  if (!mapper_->space.context.host_pages) {
    reason += ". Nor can it lie on the host: " + mapper_->space.context.host_refused;
    return nullptr;
  }
  if (size > mapper_->numbers().host_budget * page_) {
    reason += ". Nor does it fit on the host";
    return nullptr;
  }
  const Key host{key.stream, key.pool, key.small, Place::kHost};
  {
    Unlocked unlocked(lock);
    mapper_->mapping.prepare_host((size + page_ - 1) / page_);
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
      if (is_sticky(error.code)) throw;
      if (attempt > 0) reason += std::string(". Nor could it lie on the host: ") + error.what();
    }
  }
  return nullptr;
}

// A free block to cut `size` from, backed for it where there is none. Where pages are on their way out of other blocks
// it waits for them without the lock, and looks for a place anew.
Blocks::Block* Heap::fit(Lock& lock, const Key& key, std::uint64_t size, Arena*& arena) {
  constexpr int kWaits = 3;  // others may take what was waited for
  for (int waits = 0;; ++waits) {
    Arenas& arenas = arenas_for(key);
    Blocks::Placement placement;
    for (auto& candidate : arenas) {
      arena = candidate.get();
      if (Blocks::Block* block = arena->blocks.best_fit(size)) return block;
      placement = arena->blocks.place(size);
      if (placement.hole != nullptr) break;
    }
    if (placement.hole == nullptr) {
      arena = &add_arena(arenas, key, size);
      placement = arena->blocks.place(size);
    }
    try {
      if (back(*arena, placement, waits < kWaits)) return arena->blocks.best_fit(size);
    } catch (const PoolExhausted&) {
      if (waits >= kWaits || mapper_->retiring() == 0 || mapper_->fences.capturing()) throw;
    }
    Unlocked unlocked(lock);
    mapper_->reap(true);
  }
}

// Nobody will allocate from a released pool again: its arenas go as soon as no block of theirs is live.
void Heap::drop_released() {
  for (auto entry = arenas_.begin(); entry != arenas_.end();) {
    const bool released = !(entry->first.pool == MempoolId{}) && pools_.count(entry->first.pool) == 0;
    const bool idle = std::all_of(entry->second.begin(), entry->second.end(),
                                  [](const auto& arena) { return arena->blocks.empty(); });
    if (released && idle) {
      for (const auto& arena : entry->second) tell_all_unmapped(*arena);
    }
    entry = released && idle ? arenas_.erase(entry) : std::next(entry);
  }
  hot_[0] = hot_[1] = nullptr;
}

// The words of torch's own error, by which programs recognise it: accelerate looks for " out of memory.".
std::string Heap::out_of_memory(std::size_t asked) {
  constexpr unsigned kGiB = 3;
  const std::string tried = in_units(asked, kGiB);
  if (mapper_->space.driver.is_standin()) return format("CPU out of memory. Tried to allocate %s.", tried.c_str());
  std::string room;
  try {
    const auto [free, total] = mapper_->free_memory();
    room = format(" GPU %d has a total capacity of %s of which %s is free.", mapper_->space.context.ordinal,
                  in_units(total, kGiB).c_str(), in_units(free, kGiB).c_str());
  } catch (const DriverError&) {
    // The driver cannot say it now; the error is raised without.
  }
  return format("CUDA out of memory. Tried to allocate %s.%s", tried.c_str(), room.c_str());
}

std::string Heap::exhausted(std::size_t asked, const std::string& reason, std::size_t missing) {
  const auto pages = mapper_->numbers();
  const std::size_t enough = (pages.budget + missing) * page_;
  const std::string larger = missing ? format("to %s (ballonet.set_budget(%zu)", in_units(enough).c_str(), enough)
                                     : std::string("(ballonet.set_budget");
  const auto bytes = [&](Owner owner) { return in_units(pages.pages[static_cast<std::size_t>(owner)] * page_); };
  return format(
      "%s ballonet: budget %s in pages of %s: weights %s, activations %s (of which %s in live "
      "tensors), KV cache %s, retiring %s, free %s, not created %s; spilled to the host %s. %s. To go on: raise the "
      "budget %s, or BALLONET_BUDGET), use a smaller batch or a shorter context, or drop tensors and "
      "caches that are no longer needed",
      out_of_memory(asked).c_str(), in_units(pages.budget * page_).c_str(), in_units(page_).c_str(),
      bytes(Owner::kWeights).c_str(), bytes(Owner::kActivations).c_str(), in_units(usage_.live_bytes()).c_str(),
      bytes(Owner::kKv).c_str(), bytes(Owner::kRetiring).c_str(), bytes(Owner::kFree).c_str(),
      in_units(pages.budget > pages.created ? (pages.budget - pages.created) * page_ : 0).c_str(),
      in_units(pages.spilled * page_).c_str(), reason.c_str(), larger.c_str());
}

Heap::Numbers Heap::numbers_locked() const {
  const Usage all = usage_.of(BALLONET_ALL);
  Numbers numbers{all.bytes.current,
                  all.bytes.peak,
                  all.requested.current,
                  all.requested.peak,
                  all.blocks.current,
                  all.blocks.added,
                  all.blocks.removed,
                  hits_,
                  all.bytes.added,
                  all.bytes.removed,
                  0,
                  retries_,
                  refusals_,
                  waits_,
                  {}};
  for (int kind = 0; kind < BALLONET_CLASSES; ++kind) numbers.usage[kind] = usage_.of(kind);
  for (const auto& [key, arenas] : arenas_) {
    for (const auto& arena : arenas) numbers.cached += arena->blocks.free_bytes();
  }
  return numbers;
}

void Heap::reset_peaks() {
  std::lock_guard<std::mutex> lock(mutex);
  usage_.reset_peaks();
}

void Heap::check() {
  std::lock_guard<std::mutex> lock(mutex);
  std::size_t live = 0;
  std::uint64_t bytes = 0;
  for (const auto& [key, arenas] : arenas_) {
    for (const auto& arena : arenas) {
      arena->blocks.check();
      std::size_t backed = 0;  // pieces before this one are known to be backed
      for (const Blocks::Block* block = arena->blocks.first(); block != nullptr; block = block->after) {
        const bool hole = block->state == Blocks::State::kHole;
        const std::size_t last = (block->offset + block->size + page_ - 1) / page_;
        for (std::size_t i = std::max<std::size_t>(backed, block->offset / page_); i < (hole ? 0 : last); ++i) {
          if (arena->range->backing(i) != (key.place == Place::kHost ? Backing::kHost : Backing::kDevice)) {
            throw InvariantBroken(format("piece %zu lies under a block and is not backed", i));
          }
          backed = i + 1;
        }
        if (block->state == Blocks::State::kLive) ++live, bytes += block->size;
      }
    }
  }
  for (const Waiting& waiting : waiting_) --live, bytes -= waiting.block->size;
  if (live != live_.size() || bytes != usage_.live_bytes())
    throw InvariantBroken("live blocks and their addresses do not add up");
}

std::size_t Heap::close() {
  trim_and_wait();
  std::lock_guard<std::mutex> lock(mutex);
  if (live_.size() > 0 || !waiting_.empty()) return live_.size() + waiting_.size();
  hot_[0] = hot_[1] = nullptr;
  arenas_.clear();
  return 0;
}

}  // namespace ballonet
