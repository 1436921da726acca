// The pool as a CUDA allocator of torch's, with its whole contract: statistics, snapshots, history, observers, pools of
// graphs and their checkpoints, the profiler's events. A subclass of torch's pluggable allocator, which refuses most of
// these.
//
// Compiled for each release of torch (`allocator/torch_parts.py`), with CUDA's headers. The core is reached through the
// table of entry.h. It does not use Python's interface, so that one file serves every Python:
// `ballonet_torch_place` puts the allocator into place as `change_current_allocator` does, and torch itself says then
// which Python object stands for it (`torch._C._cuda_getAllocator()`).
//
// Note [One source, several torches]
// From 2.11 to 2.15 the base class gained seven functions, with a default or refused by the pluggable allocator. What
// overrides them carries no `override`: where the base lacks it, it is one more member that nobody calls.

#include <c10/core/Allocator.h>
#include <c10/core/impl/GPUTrace.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/csrc/cuda/CUDAPluggableAllocator.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "entry.h"
#include "history.h"
#include "report.h"

#define BALLONET_EXPORT extern "C" __attribute__((visibility("default")))

namespace ballonet_torch {
namespace {

namespace native = c10::cuda::CUDACachingAllocator;
using c10::DeviceIndex;
using Pool = c10::MempoolId_t;

const BallonetCore* core = nullptr;  // set once, before anything that reads it is given to torch
int ordinal = 0;                     // of the device that the core serves

[[noreturn]] void raise(int reason, const std::string& message) {
  const c10::SourceLocation here{__func__, __FILE__, static_cast<std::uint32_t>(__LINE__)};
  if (reason == BALLONET_EXHAUSTED) throw c10::OutOfMemoryError(here, message);
  if (reason == BALLONET_BROKEN) throw c10::AcceleratorError(here, core->last_code(), message);
  throw c10::Error(here, message);
}

void check(int failed) {
  if (C10_UNLIKELY(failed)) raise(failed, core->last_error());
}

// The stack that caused what this thread makes the heap do: pages that it maps or unmaps carry it.
thread_local Context cause;

class Because {
 public:
  explicit Because(Context context) : before_(std::exchange(cause, std::move(context))) {}
  ~Because() { cause = std::move(before_); }
  Because(const Because&) = delete;
  Because& operator=(const Because&) = delete;

 private:
  Context before_;
};

// A pool's state; see Note [Checkpoints] in live_blocks.h.
struct PoolState final : native::AllocatorState {
  explicit PoolState(const void* state_) : state(state_) {}
  ~PoolState() override { core->forget_checkpoint(state); }
  const void* const state;
};

using Base = torch::cuda::CUDAPluggableAllocator::CUDAPluggableAllocator;

class CudaAllocator final : public Base {
 public:
  CudaAllocator() : Base(nullptr, nullptr) {}

  // -- Blocks -------------------------------------------------------------------------------------------------------

  c10::DataPtr allocate(std::size_t size) override {
    constexpr std::size_t kExabyte = 1ULL << 60;
    if (C10_UNLIKELY(size >= kExabyte))
      raise(BALLONET_EXHAUSTED, "CUDA out of memory. Tried to allocate more than 1EB memory.");
    const DeviceIndex device = current_device();
    void* block = size == 0 ? nullptr : take(size, device, c10::cuda::getCurrentCUDAStream(device));
    return {block, block, raw_deleter(), c10::Device(c10::DeviceType::CUDA, device)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return enabled_ ? &free_block : &free_stock; }

  void* raw_alloc(std::size_t size) override {
    return raw_alloc_with_stream(size, c10::cuda::getCurrentCUDAStream(current_device()));
  }

  void* raw_alloc_with_stream(std::size_t size, cudaStream_t stream) override {
    return size == 0 ? nullptr : take(size, current_device(), stream);
  }

  void raw_delete(void* block) override {
    if (block == nullptr) return;
    if (!core->owns(block)) return free_stock(block);
    TORCH_CHECK(give_back(block) || !core->serving(), "invalid device pointer: ", block);
  }

  void recordStream(const c10::DataPtr& block, c10::cuda::CUDAStream stream) override {
    if (block.get() != nullptr) core->record_stream(block.get(), stream.stream());
  }

  // Without the pool: every allocation is one of the driver's own (torch.cuda.caching_allocator_enable).
  void enable(bool value) override { enabled_ = value; }
  bool isEnabled() const override { return enabled_; }

  // -- Life ---------------------------------------------------------------------------------------------------------

  void init(int devices) override {
    constexpr std::uint8_t kFirst = 255;  // above torch's own, which 2.15 leaves in place otherwise
    Base::init(devices);
    c10::SetAllocator(c10::DeviceType::CUDA, this, kFirst);  // whom torch.accelerator asks
  }

  std::string name() override { return "ballonet"; }

  void emptyCache(Pool pool = {0, 0}) override {
    const Because because(history_.gather(RecordContext::ALL));
    core->trim(ordinal);
    (void)pool;  // what a released pool holds goes with it, and one that is in use keeps its pages
  }

  double getMemoryFraction(DeviceIndex device) override { return core->fraction(device); }
  void setMemoryFraction(double fraction, DeviceIndex device) override {
    TORCH_CHECK(0 <= fraction && fraction <= 1, "invalid fraction:", fraction, ". Please set within [0, 1].");
    core->set_fraction(device, fraction);
  }

  void cacheInfo(DeviceIndex device, std::size_t* largest) override {
    std::size_t total = 0;
    if (*largest == 0) check(core->memory_info(device, largest, &total));
    *largest = std::max(*largest, core->largest_free(device));
  }

  std::pair<std::size_t, std::size_t> getMemoryInfo(DeviceIndex device) override {
    if (device != ordinal) return Base::getMemoryInfo(device);
    std::size_t free = 0, total = 0;
    check(core->memory_info(device, &free, &total));
    return {free, total};
  }

  // -- Statistics, snapshots, history -------------------------------------------------------------------------------

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    BallonetStats stats{};
    core->stats(device, &stats);
    return device_stats(stats);
  }
  void resetAccumulatedStats(DeviceIndex device) override { core->reset_accumulated(device); }
  void resetPeakStats(DeviceIndex device) override { core->reset_peaks(device); }

  native::SnapshotInfo snapshot(Pool pool = {0, 0}, bool include_traces = true) override {
    native::SnapshotInfo result{};
    result.config_metadata.expandable_segments = true;
    result.config_metadata.last_allocator_settings = "ballonet";  // whose segments these are, for who reads a recording
    if (include_traces) {
      result.device_traces.resize(static_cast<std::size_t>(ordinal) + 1);
      result.device_traces.back() = history_.entries();
      result.external_annotations = history_.annotations();
    }
    for (const Segment& segment : segments(*core, ordinal)) {
      if (pool == Pool{0, 0} || segment.pool == pool)
        result.segments.push_back(segment_info(segment, ordinal, history_));
    }
    if (history_.listening()) history_.add(TraceEntry::SNAPSHOT, 0, 0, nullptr, {0, 0}, device_of_core(), nullptr);
    return result;
  }

  std::vector<native::StreamSegmentSize> getExpandableSegmentSizes(DeviceIndex device) override {
    return segment_sizes(segments(*core, device));
  }

  bool isHistoryEnabled() override { return history_.enabled(); }
  void recordHistory(bool enabled, native::CreateContextFn recorder, std::size_t capacity, native::RecordContext when,
                     bool clear, const std::vector<std::string>& skipped) override {
    history_.record(enabled, recorder, capacity, when, clear, skipped);
    watch();
  }
  void recordAnnotation(const std::vector<std::pair<std::string, std::string>>& facts) override {
    history_.annotate(current_device(), facts);
  }
  void pushCompileContext(std::string& name) override { History::compiling().push_back(name); }
  void popCompileContext() override {
    if (!History::compiling().empty()) History::compiling().pop_back();
  }
  void setUserMetadata(const std::string& metadata) override { History::metadata_of_thread() = metadata; }
  std::string getUserMetadata() override { return History::metadata_of_thread(); }
  bool supportsUserMetadata() { return true; }
  void annotateMemory(const void* block, const std::string& metadata) {
    BallonetBlock found{};
    if (core->find(block, &found)) annotate<TraceEntry>(history_, found, device_of_core(), metadata);
  }
  std::shared_ptr<c10::GatheredContext> getContextForPointer(const void* block) {
    return history_.context_of(reinterpret_cast<std::uint64_t>(block));
  }

  void attachAllocatorTraceTracker(native::AllocatorTraceTracker tracker) override {
    history_.track(std::move(tracker));
    watch();
  }
  void attachOutOfMemoryObserver(native::OutOfMemoryObserver observer) override {
    const std::lock_guard<std::mutex> lock(observers_mutex_);
    observers_.push_back(std::move(observer));
  }
  // Nothing is refused before it was tried, which is what such an observer waits for.
  void attachOomRejectionObserver(std::function<void(std::int64_t, std::size_t, std::size_t, std::size_t)>) {}

  // -- Pools --------------------------------------------------------------------------------------------------------

  void beginAllocateToPool(DeviceIndex device, Pool pool, std::function<bool(cudaStream_t)> filter) override {
    core->begin_pool(device, pool,
                     [filter = std::move(filter)](void* stream) { return filter(static_cast<cudaStream_t>(stream)); });
  }
  void endAllocateToPool(DeviceIndex device, Pool pool) override { core->end_pool(device, pool); }
  void releasePool(DeviceIndex device, Pool pool) override { core->release_pool(device, pool); }
  int getPoolUseCount(DeviceIndex device, Pool pool) override { return core->pool_users(device, pool); }
  void createOrIncrefPool(DeviceIndex device, Pool pool, std::shared_ptr<CUDAAllocator> allocator = nullptr) override {
    TORCH_CHECK(allocator == nullptr,
                "ballonet is torch's CUDA allocator, and its pools hold pages of its own: torch.cuda.MemPool() works, "
                "torch.cuda.MemPool(allocator) with another allocator does not. Allocate from that one directly, or "
                "start a process without ballonet.install() for it");
    core->hold_pool(device, pool);
  }
  void setUseOnOOM(DeviceIndex device, Pool pool, bool use) override { core->set_use_on_oom(device, pool, use); }
  void setNoSplit(DeviceIndex, Pool) override {}  // about fragmentation, of which there is none between pages

  bool checkPoolLiveAllocations(DeviceIndex device, Pool pool, const std::unordered_set<void*>& expected) override {
    TORCH_CHECK(core->pool_users(device, pool) > 0, "Could not find pool of id");
    return live_blocks(segments(*core, device), pool) == expected;
  }

  std::shared_ptr<native::AllocatorState> getCheckpointState(DeviceIndex device, Pool pool) override {
    const void* state = core->checkpoint(device, pool);
    TORCH_CHECK(state != nullptr, core->last_error());
    return std::make_shared<PoolState>(state);
  }

  native::CheckpointDelta setCheckpointPoolState(DeviceIndex device,
                                                 std::shared_ptr<native::AllocatorState> state) override {
    const auto* pool = dynamic_cast<const PoolState*>(state.get());
    TORCH_CHECK(pool != nullptr, "this checkpoint is of another allocator than ballonet's");
    const Context context = history_.gather(RecordContext::STATE);
    Change change{*this, {}, {}};
    check(core->restore_checkpoint(
        device, pool->state, &change, [](void* to, void* block) { static_cast<Change*>(to)->freed.push_back(block); },
        [](void* to, void* block) { static_cast<Change*>(to)->created.push_back(block); }));
    native::CheckpointDelta delta;
    for (void* block : change.freed) {
      history_.forget(reinterpret_cast<std::uint64_t>(block));
      delta.ptrs_freed.push_back(block);
    }
    for (void* block : change.created) {
      tell_allocated(block, context);
      delta.dataptrs_allocd.emplace_back(block, block, &free_block, c10::Device(c10::DeviceType::CUDA, device));
    }
    return delta;
  }

  // -- Other processes, other devices -------------------------------------------------------------------------------

  void* getBaseAllocation(void*, std::size_t*) override { refuse_sharing(); }
  native::ShareableHandle shareIpcHandle(void*) override { refuse_sharing(); }
  std::shared_ptr<void> getIpcDevPtr(std::string) override {
    TORCH_CHECK(false,
                "under ballonet a process cannot open CUDA memory that another one shares: send the tensor through "
                "the CPU");
  }

  cudaError_t memcpyAsync(void* to, int to_device, const void* from, int from_device, std::size_t size,
                          cudaStream_t stream, bool p2p_enabled) override {
    if (p2p_enabled || to_device == from_device)
      return cudaMemcpyAsync(to, from, size, cudaMemcpyDeviceToDevice, stream);
    return cudaMemcpyPeerAsync(to, to_device, from, from_device, size, stream);  // the one for mapped memory
  }

  void tell_mapped(bool mapped, std::uint64_t address, std::size_t size, void* stream, Pool pool) {
    history_.add(mapped ? TraceEntry::SEGMENT_MAP : TraceEntry::SEGMENT_UNMAP, address, size, stream, pool,
                 device_of_core(), cause);
  }
  void tell_passed(std::uint64_t address, std::size_t size, void* stream, Pool pool) {
    history_.add(TraceEntry::FREE_COMPLETED, address, size, stream, pool, device_of_core(), cause);
  }

 private:
  struct Change {
    CudaAllocator& allocator;
    std::vector<void*> freed, created;
  };

  static DeviceIndex current_device() {
    DeviceIndex device = -1;
    C10_CUDA_CHECK(c10::cuda::GetDevice(&device));
    return device;
  }
  static DeviceIndex device_of_core() { return static_cast<DeviceIndex>(ordinal); }

  [[noreturn]] static void refuse_sharing() {
    raise(BALLONET_FAILED,
          "ballonet's memory cannot be shared through cudaIpc: copy the tensor to the CPU and share that");
  }

  void* take(std::size_t size, DeviceIndex device, cudaStream_t stream) {
    void* block = nullptr;
    if (C10_UNLIKELY(!enabled_)) {
      C10_CUDA_CHECK(cudaMalloc(&block, size));
      return block;
    }
    const Context context = history_.gather(RecordContext::STATE);
    const Because because(context);
    int failed = core->allocate(size, device, stream, &block);
    if (C10_UNLIKELY(failed == BALLONET_EXHAUSTED) && others_freed())
      failed = core->allocate(size, device, stream, &block);
    if (C10_UNLIKELY(failed == BALLONET_EXHAUSTED)) out_of_memory(size, device, stream, context);
    check(failed);
    if (const auto* tracer = c10::impl::GPUTrace::get_trace(); C10_UNLIKELY(tracer != nullptr))
      (*tracer)->trace_gpu_memory_allocation(c10::kCUDA, reinterpret_cast<std::uintptr_t>(block));
    tell_allocated(block, context);
    return block;
  }

  // Asks those who registered to free memory that they hold when it runs out.
  static bool others_freed() {
    bool any = false;
    for (const std::string& name : c10::FreeCudaMemoryCallbacksRegistry()->Keys())
      any |= c10::FreeCudaMemoryCallbacksRegistry()->Create(name)->Execute();
    return any;
  }

  void tell_allocated(void* block, const Context& context) {
    const bool profiled = c10::memoryProfilingEnabled();
    if (C10_LIKELY(!profiled && !history_.listening())) return;
    BallonetBlock found{};
    if (!core->find(block, &found)) return;
    history_.keep(found.address, context);
    if (history_.listening())
      history_.add(TraceEntry::ALLOC, found.address, found.requested, found.stream, found.pool, device_of_core(),
                   context);
    if (profiled) report(block, static_cast<std::int64_t>(found.size));
  }

  // False where the block is unknown.
  bool give_back(void* block) {
    if (const auto* tracer = c10::impl::GPUTrace::get_trace(); C10_UNLIKELY(tracer != nullptr))
      (*tracer)->trace_gpu_memory_deallocation(c10::kCUDA, reinterpret_cast<std::uintptr_t>(block));
    const bool profiled = c10::memoryProfilingEnabled();
    if (C10_LIKELY(!profiled && !history_.listening())) return core->deallocate(block);
    BallonetBlock found{};
    if (!core->find(block, &found)) return false;
    Context context = history_.gather(RecordContext::ALL);
    if (context == nullptr) context = history_.context_of(found.address);
    history_.forget(found.address);
    if (history_.listening()) {
      for (const auto action : {TraceEntry::FREE_REQUESTED, TraceEntry::FREE_COMPLETED}) {
        if (action == TraceEntry::FREE_COMPLETED && found.shared) continue;  // told when it is
        history_.add(action, found.address, found.requested, found.stream, found.pool, device_of_core(), context);
      }
    }
    const Because because(context);
    const bool known = core->deallocate(block);
    if (profiled) report(block, -static_cast<std::int64_t>(found.size));
    return known;
  }

  static void report(void* block, std::int64_t size) {
    BallonetStats stats{};
    core->stats(ordinal, &stats);
    c10::reportMemoryUsageToProfiler(block, size, static_cast<std::size_t>(stats.allocated_bytes[0].current),
                                     static_cast<std::size_t>(stats.reserved_bytes[0].current),
                                     c10::Device(c10::DeviceType::CUDA, device_of_core()));
  }

  [[noreturn]] void out_of_memory(std::size_t size, DeviceIndex device, void* stream, const Context& context) {
    const std::string message = core->last_error();
    std::size_t free = 0, total = 0;
    if (core->memory_info(device, &free, &total) != 0) free = total = 0;
    BallonetStats stats{};
    core->stats(device, &stats);
    if (history_.listening()) history_.add(TraceEntry::OOM, free, size, stream, {0, 0}, device, context);
    c10::reportOutOfMemoryToProfiler(
        static_cast<std::int64_t>(size), static_cast<std::size_t>(stats.allocated_bytes[0].current),
        static_cast<std::size_t>(stats.reserved_bytes[0].current), c10::Device(c10::DeviceType::CUDA, device));
    std::unique_lock<std::mutex> lock(observers_mutex_);
    const auto observers = observers_;
    lock.unlock();  // they may call Python
    for (const auto& observer : observers) observer(device, size, total, free);
    raise(BALLONET_EXHAUSTED, message);
  }

  void watch();

  static void free_block(void* block);
  static void free_stock(void* block) { C10_CUDA_CHECK(cudaFree(block)); }

  std::atomic<bool> enabled_{true};
  History history_;
  std::mutex observers_mutex_;
  std::vector<native::OutOfMemoryObserver> observers_;
};

// Never destroyed: torch may allocate and free until the process is gone.
CudaAllocator* allocator = nullptr;

constexpr BallonetObserver kObserver = {
    [](std::uint64_t address, std::uint64_t size, void* stream, BallonetPool pool) {
      allocator->tell_mapped(true, address, size, stream, pool);
    },
    [](std::uint64_t address, std::uint64_t size, void* stream, BallonetPool pool) {
      allocator->tell_mapped(false, address, size, stream, pool);
    },
    [](std::uint64_t address, std::uint64_t size, void* stream, BallonetPool pool) {
      allocator->tell_passed(address, size, stream, pool);
    },
};

void CudaAllocator::watch() { core->observe(ordinal, history_.listening() ? &kObserver : nullptr); }

void CudaAllocator::free_block(void* block) {
  if (block != nullptr) allocator->give_back(block);
}

}  // namespace
}  // namespace ballonet_torch

// -- What Python calls -----------------------------------------------------------------------------------------------

// The core to use, and the ordinal of its device. False where the table is of another version than this file.
BALLONET_EXPORT bool ballonet_torch_init(const BallonetCore* table, int device) {
  if (table->version != kBallonetCoreVersion) return false;
  ballonet_torch::core = table;
  ballonet_torch::ordinal = device;
  return true;
}

// Makes it torch's CUDA allocator. False where torch has used another one.
BALLONET_EXPORT bool ballonet_torch_place() {
  namespace native = c10::cuda::CUDACachingAllocator;
  if (native::get()->initialized()) return false;
  static const auto held = std::make_shared<ballonet_torch::CudaAllocator>();
  ballonet_torch::allocator = held.get();
  static const auto forever = new std::shared_ptr<native::CUDAAllocator>(held);
  torch::cuda::CUDAPluggableAllocator::changeCurrentAllocator(*forever);
  return true;
}
