// Where torch's calls arrive: the table that the companion uses, and plain entry points for a pluggable allocator where
// there is no companion. Nothing thrown leaves the table.
#include "entry.h"

#include <stdexcept>
#include <string>

#include "registry.h"

namespace ballonet {
namespace {

thread_local std::string t_error;

int fail(int code, const char* message) {
  t_error = message;
  return code;
}

int allocate(std::size_t size, int device, void* stream, void** out) {
  try {
    Device* const bound = bound_device(device);
    if (bound == nullptr)
      return fail(2,
                  "ballonet serves one device, and not this one: show torch no other (CUDA_VISIBLE_DEVICES), or "
                  "install() for it");
    *out = bound->heap.allocate(size, static_cast<CUstream>(stream));
    return 0;
  } catch (const PoolExhausted& error) {
    return fail(BALLONET_EXHAUSTED, error.what());
  } catch (const std::exception& error) {
    return fail(2, error.what());
  }
}

void deallocate(void* pointer) {
  if (Heap* heap = heap_of(pointer)) heap->deallocate(pointer);
}

void record_stream(void* pointer, void* stream) {
  if (Heap* heap = heap_of(pointer)) heap->record_stream(pointer, static_cast<CUstream>(stream));
}

// The callers below have no way to report a failure: what fails here leaves pages cached, and the next call tries
// again.
void trim(int ordinal) {
  try {
    if (Device* device = bound_device(ordinal)) device->trim();
  } catch (const std::exception& error) {
    t_error = error.what();
  }
}

void begin_pool(int ordinal, BallonetMempool pool, BallonetStreamFilter filter, void* context) {
  if (Device* device = bound_device(ordinal)) {
    device->heap.begin_pool({pool.first, pool.second}, [=](CUstream stream) { return filter(context, stream); });
  }
}

void end_pool(int ordinal, BallonetMempool pool) {
  if (Device* device = bound_device(ordinal)) device->heap.end_pool({pool.first, pool.second});
}

void release_pool(int ordinal, BallonetMempool pool) {
  if (Device* device = bound_device(ordinal)) device->heap.release_pool({pool.first, pool.second});
}

constexpr BallonetCore kCore = {
    kBallonetCoreVersion,
    allocate,
    deallocate,
    record_stream,
    trim,
    begin_pool,
    end_pool,
    release_pool,
    owns,
    serving,
    [] { return t_error.c_str(); },
};

}  // namespace

const BallonetCore* core_table() { return &kCore; }

}  // namespace ballonet

extern "C" {

// torch turns a null pointer into a null tensor, so a failure has to be thrown.
__attribute__((visibility("default"))) void* ballonet_plain_alloc(std::ptrdiff_t size, int device, void* stream) {
  if (size <= 0) return nullptr;
  void* out = nullptr;
  if (ballonet::kCore.allocate(static_cast<std::size_t>(size), device, stream, &out) != 0) {
    throw std::runtime_error(ballonet::kCore.last_error());
  }
  return out;
}

// A segment for torch's own caching allocator (torch.cuda.MemPool), to which a null pointer is memory that ran out: it
// gives back what it caches and asks once more.
__attribute__((visibility("default"))) void* ballonet_plain_segment(std::ptrdiff_t size, int device, void* stream) {
  if (size <= 0) return nullptr;
  void* out = nullptr;
  const int failed = ballonet::kCore.allocate(static_cast<std::size_t>(size), device, stream, &out);
  if (failed == 0 || failed == BALLONET_EXHAUSTED) return out;
  throw std::runtime_error(ballonet::kCore.last_error());
}

__attribute__((visibility("default"))) void ballonet_plain_free(void* pointer, std::ptrdiff_t, int, void*) {
  ballonet::kCore.deallocate(pointer);
}

__attribute__((visibility("default"))) void ballonet_plain_record_stream(void* pointer, void* stream) {
  ballonet::kCore.record_stream(pointer, stream);
}

__attribute__((visibility("default"))) void ballonet_plain_trim() {
  for (int ordinal = 0; ordinal < ballonet::kMaxDevices; ++ordinal) ballonet::kCore.trim(ordinal);
}

}  // extern "C"
