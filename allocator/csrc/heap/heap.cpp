#include "heap/heap.h"

#include "heap/heap_report.h"

namespace ballonet {

Heap::Heap(std::shared_ptr<Mapper> mapper, Reclaim& reclaim, bool spill)
    : mapper_(std::move(mapper)), supply_(*mapper_, reclaim, arenas_, pools, pages_, live_, report_, spill) {}

void* Heap::allocate(std::size_t size, CUstream stream) {
  HeapLock lock(mutex);
  if (size > kLargest) throw PoolExhausted(exhausted(size, "No device has as much memory as that"));
  const std::uint64_t wanted = Blocks::rounded(size);
  const CUstream owner = Streams::of_all_threads(stream);
  const ArenaKey key{owner, pools.of(stream), wanted < small_};
  Arena* arena = nullptr;
  Blocks::Block* block = Arenas::best_fit(arenas_.of(key), wanted, arena);
  if (block == nullptr) {
    block = supply_.find(lock, key, wanted, arena);
  } else {
    ++hits_;
  }
  block = arena->blocks.take(block, wanted);
  void* const address = live_.hand_out(*arena, block, size);
  if (is_per_thread(stream)) live_.use_on(block, owner);
  return address;
}

bool Heap::deallocate(void* address) {
  std::lock_guard<std::mutex> lock(mutex);
  if (!live_.give_back(reinterpret_cast<std::uint64_t>(address))) return false;
  if (mapper_->space.device.above_budget()) harvest_excess();
  return true;
}

// While more exists than the budget allows, pages leave as soon as nothing lies on them.
void Heap::harvest_excess() {
  live_.free_passed();
  pages_.harvest_excess();
}

void Heap::record_stream(void* address, CUstream stream) {
  std::lock_guard<std::mutex> lock(mutex);
  Blocks::Block* block = live_.at(reinterpret_cast<std::uint64_t>(address));
  const CUstream user = Streams::of_all_threads(stream);
  if (block == nullptr || (Arena::of(block).key.stream == user && !is_per_thread(stream))) return;
  live_.use_on(block, user);
}

std::size_t Heap::block_size(void* address) {
  std::lock_guard<std::mutex> lock(mutex);
  const Blocks::Block* block = live_.at(reinterpret_cast<std::uint64_t>(address));
  return block == nullptr ? 0 : block->size;
}

std::size_t Heap::trim_and_wait() {
  HeapLock lock(mutex);
  return mapper_->fences.capturing() ? 0 : supply_.give_up_idle(lock);
}

std::size_t Heap::give(std::size_t lacking) {
  HeapLock lock(mutex);
  return mapper_->fences.capturing() ? 0 : supply_.give_up_idle(lock, pages_.worth_giving(lacking));
}

std::size_t Heap::idle_pages(bool wait) {
  HeapLock lock(mutex);
  if (wait && !mapper_->fences.capturing()) live_.wait_freed(lock);
  return pages_.idle();
}

void Heap::shrink(bool wait) {
  wait = wait && !mapper_->fences.capturing();
  {
    HeapLock lock(mutex);
    if (wait) live_.wait_freed(lock);
    if (mapper_->space.device.above_budget()) harvest_excess();
  }
  if (!wait) return;
  mapper_->reap(true);
  if (!mapper_->space.device.above_budget()) return;
  {
    HeapLock lock(mutex);
    pages_.harvest_excess(false);  // what is still retiring is shown elsewhere
  }
  mapper_->reap(true);
}

Heap::Numbers Heap::numbers_locked() const {
  const Usage all = report_.usage.of(BALLONET_ALL);
  const BlockSupply::Counts& counts = supply_.counts();
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
                  counts.retries,
                  counts.refusals,
                  counts.waits,
                  {}};
  for (int kind = 0; kind < BALLONET_CLASSES; ++kind) numbers.usage[kind] = report_.usage.of(kind);
  for (const Arena* arena : arenas_.all()) numbers.cached += arena->blocks.free_bytes();
  return numbers;
}

std::string Heap::exhausted(std::size_t asked, const std::string& reason, std::size_t missing) {
  return ballonet::exhausted(*mapper_, report_.usage, asked, reason, missing);
}

void Heap::reset_peaks() {
  std::lock_guard<std::mutex> lock(mutex);
  report_.usage.reset_peaks();
}

void Heap::observe(const BallonetObserver* observer) {
  std::lock_guard<std::mutex> lock(mutex);
  report_.observe(observer);
}

void Heap::check() {
  std::lock_guard<std::mutex> lock(mutex);
  const auto [blocks, bytes] = arenas_.check();
  live_.check(blocks, bytes);
}

std::size_t Heap::close() {
  trim_and_wait();
  std::lock_guard<std::mutex> lock(mutex);
  if (live_.size() == 0) arenas_.drop([](const ArenaKey&, const Arenas::List&) { return true; });
  return live_.size();
}

}  // namespace ballonet
