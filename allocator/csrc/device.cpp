#include "device.h"

namespace ballonet {

Device::Device(const Mapper::Options& options)
    : mapper(std::make_shared<Mapper>(options)), reclaim(mapper), heap(mapper, reclaim) {}

Device::~Device() {
  try {
    close();
  } catch (const std::exception&) {
    // Whoever drops a device that still has blocks in use has nobody to tell; its pages go as its ranges do.
  }
}

void Device::map(Range& range, std::size_t first, std::size_t count, Place place) {
  if (place == Place::kDevice) return with_idle_pages(count, [&] { mapper->map(range, first, count, place); });
  try {
    mapper->map(range, first, count, place);
  } catch (const PoolExhausted& reason) {
    throw PoolExhausted(host_exhausted(count, reason.what()));
  }
}

bool Device::own(Range& range, std::size_t first, std::size_t count) {
  return with_idle_pages(count, [&] { return mapper->own(range, first, count); });
}

// Attempts what takes so many device pages, once more after the heap gave up what it could, and again with what can be
// reclaimed.
template <class Attempt>
auto Device::with_idle_pages(std::size_t pages, Attempt attempt) -> decltype(attempt()) {
  try {
    return attempt();
  } catch (const PoolExhausted&) {
    heap.trim_and_wait();
  }
  try {
    return reclaim.supply(attempt);
  } catch (const PoolExhausted& reason) {
    std::lock_guard<std::mutex> lock(heap.mutex);
    throw PoolExhausted(heap.exhausted(pages * mapper->page_size, reason.what()));
  }
}

// The heap has no host pages, so there is nothing to trim for them.
std::string Device::host_exhausted(std::size_t pages, const std::string& reason) {
  const auto numbers = mapper->numbers();
  const std::size_t page = mapper->page_size;
  return format(
      "ballonet: tried to map %s of host memory. Host budget %s in pages of %s, of which %s exist. %s. To go on: give "
      "a larger host budget (ballonet.install(host_budget=...), or BALLONET_HOST_BUDGET), or drop models and caches "
      "that have pages there",
      in_units(pages * page).c_str(), in_units(numbers.host_budget * page).c_str(), in_units(page).c_str(),
      in_units(numbers.host_created * page).c_str(), reason.c_str());
}

void Device::set_budget(std::size_t bytes) {
  const std::size_t pages = bytes / mapper->page_size;
  if (pages < mapper->numbers().created) heap.trim_and_wait();
  mapper->set_budget(pages);
  reclaim.shrink();
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
  reclaim.check();
}

}  // namespace ballonet
