#include "device/contract.h"

#include <memory>

#include "device/registry.h"

namespace ballonet {
namespace {

// Throws UsageError where none is bound.
Device& served(int ordinal) {
  if (Device* device = bound_device(ordinal)) return *device;
  throw UsageError("ballonet serves no such device");
}

// What `act` returns, or `none` where no device is bound to the ordinal.
template <class Result, class Act>
Result if_bound(int ordinal, Result none, Act act) {
  Device* device = bound_device(ordinal);
  return device == nullptr ? none : act(*device);
}

// Runs what may throw: 0, or the code of the failure.
template <class Act>
int attempt(Act act) {
  try {
    act();
    return 0;
  } catch (...) {
    return keep_failure();
  }
}

}  // namespace

void fill_contract(BallonetCore& table) {
  table.hold_pool = [](int ordinal, BallonetPool pool) {
    if (Device* device = bound_device(ordinal)) device->heap.pools.hold(pool);
  };
  table.pool_users = [](int ordinal, BallonetPool pool) {
    return if_bound(ordinal, 0, [&](Device& device) { return static_cast<int>(device.heap.pools.users(pool)); });
  };
  table.set_use_on_oom = [](int ordinal, BallonetPool pool, bool use) {
    if (Device* device = bound_device(ordinal)) device->heap.pools.set_use_on_oom(pool, use);
  };
  table.checkpoint = [](int ordinal, BallonetPool pool) -> const void* {
    const Checkpoint* state = nullptr;
    attempt([&] { state = new Checkpoint(served(ordinal).heap.checkpoints.take(pool)); });
    return state;
  };
  table.forget_checkpoint = [](const void* state) { delete static_cast<const Checkpoint*>(state); };
  table.restore_checkpoint = [](int ordinal, const void* state, void* context, void (*freed)(void*, void*),
                                void (*created)(void*, void*)) {
    return attempt([&] {
      const auto restored = served(ordinal).heap.checkpoints.restore(*static_cast<const Checkpoint*>(state));
      for (void* block : restored.freed) freed(context, block);
      for (void* block : restored.created) created(context, block);
    });
  };
  table.find = [](const void* pointer, BallonetBlock* out) {
    Heap* heap = heap_of(pointer);
    return heap != nullptr && heap->snapshot.find(pointer, *out);
  };
  table.segments = [](int ordinal, void* context, void (*each)(void*, const BallonetSegment*)) {
    Device* device = bound_device(ordinal);
    if (device == nullptr) return;
    for (Segment& segment : device->segments()) {
      segment.facts.blocks = segment.blocks.data();
      segment.facts.count = segment.blocks.size();
      each(context, &segment.facts);
    }
  };
  table.observe = [](int ordinal, const BallonetObserver* observer) {
    if (Device* device = bound_device(ordinal)) device->heap.observe(observer);
  };
  table.stats = [](int ordinal, BallonetStats* out) {
    *out = if_bound(ordinal, BallonetStats{}, [](Device& device) { return device.stats(); });
  };
  table.reset_peaks = [](int ordinal) {
    if (Device* device = bound_device(ordinal)) device->reset_peaks();
  };
  table.reset_accumulated = [](int ordinal) {
    if (Device* device = bound_device(ordinal)) device->reset_accumulated();
  };
  table.memory_info = [](int ordinal, std::size_t* free, std::size_t* total) {
    return attempt([&] { std::tie(*free, *total) = served(ordinal).memory_info(); });
  };
  table.largest_free = [](int ordinal) {
    return if_bound(ordinal, std::size_t{0}, [](Device& device) { return device.heap.snapshot.largest_free(); });
  };
  table.fraction = [](int ordinal) { return if_bound(ordinal, 1.0, [](Device& device) { return device.fraction(); }); };
  table.set_fraction = [](int ordinal, double value) {
    if (Device* device = bound_device(ordinal)) device->set_fraction(value);
  };
}

}  // namespace ballonet
