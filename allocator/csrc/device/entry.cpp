// Where torch's calls arrive: the table that the companion uses, and plain entry points for a pluggable allocator,
// which need nothing of torch. Nothing thrown leaves the table.
#include "torch/entry.h"

#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

#include "device/registry.h"

namespace ballonet {
namespace {

thread_local std::string t_error;
thread_local int t_code = 0;

int fail(int reason, std::string message, int code = 0) {
  t_error = std::move(message);
  t_code = code;
  return reason;
}

// The error text where the driver fails for good, which no smaller batch repairs.
std::string broken(const DriverError& error) {
  return format(
      "CUDA error: %s (%d), found by ballonet in %s. This is not for want of memory: an earlier kernel failed, and the "
      "CUDA context of this process can no longer be used. To go on: start a new process; CUDA_LAUNCH_BLOCKING=1 or "
      "compute-sanitizer shows which kernel it was",
      error.name.c_str(), static_cast<int>(error.code), error.function.c_str());
}

// Keeps a failure for `last_error` and returns its code. Pre: in a catch block.
int keep_failure() {
  try {
    throw;
  } catch (const PoolExhausted& error) {
    return fail(BALLONET_EXHAUSTED, error.what());
  } catch (const DriverError& error) {
    if (cuda::is_sticky(error.code)) return fail(BALLONET_BROKEN, broken(error), static_cast<int>(error.code));
    return fail(BALLONET_FAILED, error.what(), static_cast<int>(error.code));
  } catch (const std::exception& error) {
    return fail(BALLONET_FAILED, error.what());
  }
}

int allocate(std::size_t size, int device, void* stream, void** out) {
  try {
    Device* const bound = bound_device(device);
    if (bound == nullptr)
      return fail(BALLONET_FAILED,
                  "ballonet serves one device, and not this one: show torch no other (CUDA_VISIBLE_DEVICES), or "
                  "install() for it");
    *out = bound->heap.allocate(size, static_cast<CUstream>(stream));
    return 0;
  } catch (...) {
    return keep_failure();
  }
}

bool deallocate(void* pointer) {
  Heap* heap = heap_of(pointer);
  return heap != nullptr && heap->deallocate(pointer);
}

void record_stream(void* pointer, void* stream) {
  if (Heap* heap = heap_of(pointer)) return heap->record_stream(pointer, static_cast<CUstream>(stream));
  note_range_stream(pointer, static_cast<CUstream>(stream));
}

// The callers have no way to report a failure: what fails here leaves pages cached, and the next call tries again.
void trim(int ordinal) {
  try {
    if (Device* device = bound_device(ordinal)) device->trim();
  } catch (const std::exception& error) {
    fail(BALLONET_FAILED, error.what());
  }
}

// torch turns a null pointer into a null tensor, so a failure has to be thrown.
void* plain_alloc(std::ptrdiff_t size, int device, void* stream) {
  if (size <= 0) return nullptr;
  void* out = nullptr;
  if (core_table()->allocate(static_cast<std::size_t>(size), device, stream, &out) != 0) {
    throw std::runtime_error(core_table()->last_error());
  }
  return out;
}

// A segment for torch's own caching allocator (torch.cuda.MemPool), to which a null pointer is memory that ran out: it
// gives back what it caches and asks once more.
void* plain_segment(std::ptrdiff_t size, int device, void* stream) {
  if (size <= 0) return nullptr;
  void* out = nullptr;
  const int failed = core_table()->allocate(static_cast<std::size_t>(size), device, stream, &out);
  if (failed == 0 || failed == BALLONET_EXHAUSTED) return out;
  throw std::runtime_error(core_table()->last_error());
}

void plain_free(void* pointer, std::ptrdiff_t, int, void*) { core_table()->deallocate(pointer); }

void plain_record_stream(void* pointer, void* stream) { core_table()->record_stream(pointer, stream); }

void plain_trim() {
  for (int ordinal = 0; ordinal < kMaxDevices; ++ordinal) core_table()->trim(ordinal);
}

// Note [Pools of CUDA graphs]
// Without these three a graph's temporaries would come from the common heap, and what is allocated later would get
// their addresses, which every replay writes to. So they must not depend on a compiler at run time: they are here,
// and take what torch passes, `std::function` and `std::pair`, whose layout is libstdc++'s and that of no torch.
void plain_begin_pool(int ordinal, BallonetPool pool, std::function<bool(void*)> filter) {
  if (Device* device = bound_device(ordinal)) device->heap.pools.begin(pool, std::move(filter));
}

void plain_end_pool(int ordinal, BallonetPool pool) {
  if (Device* device = bound_device(ordinal)) device->heap.pools.end(pool);
}

void plain_release_pool(int ordinal, BallonetPool pool) {
  if (Device* device = bound_device(ordinal)) device->heap.pools.release(pool);
}

void plain_memory_fraction(double fraction, int) {
  if (fraction < 1.0)
    throw std::runtime_error("a memory fraction cannot be set here: call ballonet.set_budget(size) instead");
}

void* plain_base_allocation(void*, std::size_t*) {
  throw std::runtime_error(
      "ballonet's memory cannot be shared through cudaIpc: copy the tensor to the CPU and share that");
}

template <class Function>
std::pair<const char*, std::uintptr_t> entry(const char* name, Function* function) {
  return {name, reinterpret_cast<std::uintptr_t>(function)};
}

// -- what only the whole contract of a CUDA allocator of torch's needs. What can fail says so by its code and keeps why
// for `last_error`, as in entry.h; each function takes the locks of the core that it needs.

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

}  // namespace

const BallonetCore* core_table() {
  static const BallonetCore core = [] {
    BallonetCore table{};
    table.version = kBallonetCoreVersion;
    table.allocate = allocate;
    table.deallocate = deallocate;
    table.record_stream = record_stream;
    table.trim = trim;
    table.owns = owns;
    table.serving = serving;
    table.last_error = [] { return t_error.c_str(); };
    table.last_code = [] { return t_code; };
    table.begin_pool = plain_begin_pool;
    table.end_pool = plain_end_pool;
    table.release_pool = plain_release_pool;
    fill_contract(table);
    return table;
  }();
  return &core;
}

std::vector<std::pair<const char*, std::uintptr_t>> plain_entry_points() {
  return {
      entry("alloc", &plain_alloc),
      entry("segment", &plain_segment),
      entry("free", &plain_free),
      entry("record_stream", &plain_record_stream),
      entry("trim", &plain_trim),
      entry("begin_pool", &plain_begin_pool),
      entry("end_pool", &plain_end_pool),
      entry("release_pool", &plain_release_pool),
      entry("memory_fraction", &plain_memory_fraction),
      entry("base_allocation", &plain_base_allocation),
  };
}

}  // namespace ballonet
