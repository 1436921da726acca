#include "device.h"

namespace ballonet {

Device::Device(const Mapper::Options& options) : mapper(std::make_shared<Mapper>(options)), heap(mapper) {}

void Device::map(Range& range, std::size_t first, std::size_t count, Place place) {
  try {
    mapper->map(range, first, count, place);
    return;
  } catch (const PoolExhausted&) {
    heap.trim_and_wait();
  }
  try {
    mapper->map(range, first, count, place);
  } catch (const PoolExhausted& reason) {
    std::lock_guard<std::mutex> lock(heap.mutex);
    throw PoolExhausted(heap.exhausted(count * mapper->page_size, reason.what()));
  }
}

void Device::set_budget(std::size_t bytes) {
  const std::size_t pages = bytes / mapper->page_size;
  if (pages < mapper->numbers().created) heap.trim_and_wait();
  mapper->set_budget(pages);
}

std::size_t Device::trim() {
  const std::size_t before = mapper->numbers().pages[static_cast<std::size_t>(Owner::kActivations)];
  heap.trim_and_wait();
  const std::size_t after = mapper->numbers().pages[static_cast<std::size_t>(Owner::kActivations)];
  mapper->release_free();
  return (before > after ? before - after : 0) * mapper->page_size;
}

void Device::close() {
  if (closed_) return;
  const std::size_t live = heap.close();
  if (live > 0)
    throw UsageError(format("%zu blocks are still in use: drop the tensors that were made under ballonet first", live));
  mapper->shutdown();
  closed_ = true;
}

std::pair<Mapper::Numbers, Heap::Numbers> Device::numbers() {
  std::lock_guard<std::mutex> lock(heap.mutex);
  return {mapper->numbers(), heap.numbers_locked()};
}

void Device::check() {
  heap.check();
  mapper->check();
}

}  // namespace ballonet
