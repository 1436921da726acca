#include "device/registry.h"

#include <pthread.h>

#include <atomic>
#include <mutex>
#include <set>

#include "base/fork.h"
#include "heap/arenas.h"

namespace ballonet {
namespace {

std::atomic<Device*> g_bound[kMaxDevices];
std::atomic<int> g_bound_count{0};
std::atomic<bool> g_forked{false};
std::mutex g_mutex;

// Devices that were ever bound, never destroyed.
std::set<std::shared_ptr<Device>>& kept() {
  static auto* devices = new std::set<std::shared_ptr<Device>>;
  return *devices;
}

// Note [Fork]
// The child of a fork shares nothing with its parent: the stand-in gives it private copies of what was mapped, a GPU's
// context does not survive at all. So the child allocates from torch's own allocator and ignores the frees of what its
// parent allocated.
void in_child() { g_forked = true; }

}  // namespace

void bind(const std::shared_ptr<Device>& device) {
  const int ordinal = device->mapper->space.context.ordinal;
  if (ordinal < 0 || ordinal >= kMaxDevices)
    throw UsageError(format("device %d is beyond the %d supported", ordinal, kMaxDevices));
  static const HeldOverFork held(ForkRank::kRegistry, g_mutex);
  std::lock_guard<std::mutex> lock(g_mutex);
  static const int registered = pthread_atfork(nullptr, nullptr, in_child);
  if (registered != 0) throw UsageError("the process has no memory for a fork handler");
  Device* nobody = nullptr;
  if (!g_bound[ordinal].compare_exchange_strong(nobody, device.get())) {
    if (nobody == device.get()) return;
    throw UsageError(format("device %d is bound already; unbind it first", ordinal));
  }
  ++g_bound_count;
  kept().insert(device);
}

void unbind(const std::shared_ptr<Device>& device) {
  Device* mine = device.get();
  if (g_bound[device->mapper->space.context.ordinal].compare_exchange_strong(mine, nullptr)) --g_bound_count;
}

Device* bound_device(int ordinal) {
  if (ordinal < 0 || ordinal >= kMaxDevices || g_forked.load(std::memory_order_relaxed)) return nullptr;
  return g_bound[ordinal].load(std::memory_order_acquire);
}

Heap* heap_of(const void* pointer) {
  return g_forked.load(std::memory_order_relaxed) ? nullptr : HeapAddresses::all().find(pointer);
}

void note_range_stream(const void* pointer, CUstream stream) {
  for (int ordinal = 0; ordinal < kMaxDevices; ++ordinal) {
    Device* const device = bound_device(ordinal);
    if (device != nullptr) device->mapper->fences.note_stream_at(reinterpret_cast<CUdeviceptr>(pointer), stream);
  }
}

bool owns(const void* pointer) { return HeapAddresses::all().find(pointer) != nullptr; }

bool serving() {
  return g_bound_count.load(std::memory_order_relaxed) > 0 && !g_forked.load(std::memory_order_relaxed);
}

}  // namespace ballonet
