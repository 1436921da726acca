#include "contract.h"

#include <memory>

#include "registry.h"

namespace ballonet {
namespace {

void hold_pool(int ordinal, BallonetPool pool) {
  if (Device* device = bound_device(ordinal)) device->heap.pools.hold(pool);
}

int pool_users(int ordinal, BallonetPool pool) {
  Device* device = bound_device(ordinal);
  return device == nullptr ? 0 : static_cast<int>(device->heap.pools.users(pool));
}

void set_use_on_oom(int ordinal, BallonetPool pool, bool use) {
  if (Device* device = bound_device(ordinal)) device->heap.pools.set_use_on_oom(pool, use);
}

const void* checkpoint(int ordinal, BallonetPool pool) {
  try {
    Device* device = bound_device(ordinal);
    if (device == nullptr) throw UsageError("ballonet serves no such device");
    return new Checkpoint(device->heap.checkpoints.take(pool));
  } catch (...) {
    keep_failure();
    return nullptr;
  }
}

void forget_checkpoint(const void* state) { delete static_cast<const Checkpoint*>(state); }

int restore_checkpoint(int ordinal, const void* state, void* context, void (*freed)(void*, void*),
                       void (*created)(void*, void*)) {
  try {
    Device* device = bound_device(ordinal);
    if (device == nullptr) throw UsageError("ballonet serves no such device");
    const Checkpoints::Restored restored = device->heap.checkpoints.restore(*static_cast<const Checkpoint*>(state));
    for (void* block : restored.freed) freed(context, block);
    for (void* block : restored.created) created(context, block);
    return 0;
  } catch (...) {
    return keep_failure();
  }
}

bool find(const void* pointer, BallonetBlock* out) {
  Heap* heap = heap_of(pointer);
  return heap != nullptr && heap->snapshot.find(pointer, *out);
}

void segments(int ordinal, void* context, void (*each)(void*, const BallonetSegment*)) {
  Device* device = bound_device(ordinal);
  if (device == nullptr) return;
  for (Segment& segment : device->segments()) {
    segment.facts.blocks = segment.blocks.data();
    segment.facts.count = segment.blocks.size();
    each(context, &segment.facts);
  }
}

void observe(int ordinal, const BallonetObserver* observer) {
  if (Device* device = bound_device(ordinal)) device->heap.observe(observer);
}

void stats(int ordinal, BallonetStats* out) {
  Device* device = bound_device(ordinal);
  *out = device == nullptr ? BallonetStats{} : device->stats();
}

void reset_peaks(int ordinal) {
  if (Device* device = bound_device(ordinal)) device->reset_peaks();
}

void reset_accumulated(int ordinal) {
  if (Device* device = bound_device(ordinal)) device->reset_accumulated();
}

int memory_info(int ordinal, std::size_t* free, std::size_t* total) {
  try {
    Device* device = bound_device(ordinal);
    if (device == nullptr) throw UsageError("ballonet serves no such device");
    std::tie(*free, *total) = device->memory_info();
    return 0;
  } catch (...) {
    return keep_failure();
  }
}

std::size_t largest_free(int ordinal) {
  Device* device = bound_device(ordinal);
  return device == nullptr ? 0 : device->heap.snapshot.largest_free();
}

double fraction(int ordinal) {
  Device* device = bound_device(ordinal);
  return device == nullptr ? 1.0 : device->fraction();
}

void set_fraction(int ordinal, double value) {
  if (Device* device = bound_device(ordinal)) device->set_fraction(value);
}

}  // namespace

void fill_contract(BallonetCore& table) {
  table.hold_pool = hold_pool;
  table.pool_users = pool_users;
  table.set_use_on_oom = set_use_on_oom;
  table.checkpoint = checkpoint;
  table.forget_checkpoint = forget_checkpoint;
  table.restore_checkpoint = restore_checkpoint;
  table.find = find;
  table.segments = segments;
  table.observe = observe;
  table.stats = stats;
  table.reset_peaks = reset_peaks;
  table.reset_accumulated = reset_accumulated;
  table.memory_info = memory_info;
  table.largest_free = largest_free;
  table.fraction = fraction;
  table.set_fraction = set_fraction;
}

}  // namespace ballonet
