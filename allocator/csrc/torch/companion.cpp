// What must link torch: the functions that torch's CUDA allocator calls, and the CPU allocator where there is no GPU.
//
// Compiled for each release of torch (`allocator/torch_parts.py`), linked to libc10 only. The core is reached through
// the table of entry.h; what this file adds is torch's types: errors that Python sees as `torch.OutOfMemoryError`, the
// stream filter of a graph's pool, and `c10::Allocator`. CUDA's headers are not needed.
//
// Words
//   stock  torch's own CPU allocator, the one that was in place before
//   raw    memory taken with Allocator::raw_allocate, which is freed without the deleter that it came with

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "entry.h"

#define BALLONET_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

const BallonetCore* core = nullptr;  // set once, before anything that reads it is given to torch
int ordinal = 0;                     // of the device that the core serves

[[noreturn]] void fail(int reason) {
  const c10::SourceLocation here{__func__, __FILE__, static_cast<std::uint32_t>(__LINE__)};
  if (reason == BALLONET_EXHAUSTED) throw c10::OutOfMemoryError(here, core->last_error());
  if (reason == BALLONET_BROKEN) throw c10::AcceleratorError(here, core->last_code(), core->last_error());
  throw c10::Error(here, core->last_error());
}

void* take(std::size_t size, int device, void* stream) {
  void* block = nullptr;
  if (const int failed = core->allocate(size, device, stream, &block); C10_UNLIKELY(failed)) fail(failed);
  return block;
}

// -- The CPU allocator -----------------------------------------------------------------------------------------------

// Note [Two deleters]
// A tensor's memory carries the deleter of whoever allocated it, so one of the pool's is freed with one call and no
// question. Raw memory does not: oneDNN frees with the allocator that is current at that time, so that memory of either
// kind comes here, from before install(), from a stock section, in the child of a fork. The address tells them apart.
// For the same reason the allocator stays in place and passes everything to the stock one (`pause`) while blocks of the
// pool live: were they freed raw after the stock allocator was back, free() would get an address that it never gave.
class CpuAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t size) override {
    if (C10_UNLIKELY(bypassed(size))) return stock_.load(std::memory_order_relaxed)->allocate(size);
    void* block = nullptr;
    const int failed = core->allocate(size, ordinal, nullptr, &block);
    if (C10_UNLIKELY(failed)) {
      c10::profiledCPUMemoryReporter().OutOfMemory(size);
      fail(failed);
    }
    c10::DataPtr data{block, block, &release, c10::Device(c10::DeviceType::CPU)};
    c10::profiledCPUMemoryReporter().New(block, size);
    return data;
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release_raw; }

  void copy_data(void* to, const void* from, std::size_t count) const override { default_copy_data(to, from, count); }

  // Puts this allocator under torch. False where another one took its place since: it may call this one.
  bool install() {
    c10::Allocator* current = c10::GetCPUAllocator();
    if (placed_ && current != this) return false;
    if (!placed_) {
      stock_ = current;
      // The lowest priority that is obeyed is the one in force, which is thus left as it was.
      for (priority_ = 0; c10::GetCPUAllocator() != this; ++priority_) c10::SetCPUAllocator(this, priority_);
      --priority_;
      placed_ = true;
    }
    if (paused_.exchange(false)) bypass_.fetch_sub(1);
    return true;
  }

  // From now on everything comes from the stock allocator; what lives is still freed to where it came from.
  void pause() {
    if (!paused_.exchange(true)) bypass_.fetch_add(1);
  }

  // Puts the stock allocator back, once nothing of the pool lives. False where another allocator took the place since.
  bool restore() {
    if (!placed_) return true;
    if (c10::GetCPUAllocator() != this) return false;
    c10::SetCPUAllocator(stock_, priority_);
    placed_ = false;
    return true;
  }

  void stock_begin() {
    ++stock_depth_;
    bypass_.fetch_add(1);
  }

  void stock_end() {
    --stock_depth_;
    bypass_.fetch_sub(1);
  }

 private:
  // Is this one for the stock allocator? An empty tensor is, and a size that is a negative number, which it reports.
  bool bypassed(std::size_t size) const {
    constexpr auto kLargest = static_cast<std::size_t>(std::numeric_limits<std::ptrdiff_t>::max());
    if (size - 1 >= kLargest) return true;
    return (bypass_.load(std::memory_order_acquire) != 0 && bypassed_here()) || !core->serving();
  }

  bool bypassed_here() const { return paused_.load(std::memory_order_relaxed) || stock_depth_ > 0; }

  static void release(void* block) {
    c10::profiledCPUMemoryReporter().Delete(block);
    core->deallocate(block);
  }

  static void release_raw(void* block);

  static thread_local int stock_depth_;

  std::atomic<c10::Allocator*> stock_{nullptr};
  std::uint8_t priority_ = 0;
  bool placed_ = false;
  std::atomic<bool> paused_{true};
  std::atomic<int> bypass_{1};  // reasons, in any thread, to look closer: paused_, and the stock sections that are open
};

thread_local int CpuAllocator::stock_depth_ = 0;

// Never destroyed: torch may allocate and free until the process is gone.
CpuAllocator& cpu = *new CpuAllocator;

void CpuAllocator::release_raw(void* block) {
  if (core->owns(block)) {
    release(block);
  } else if (block != nullptr) {
    cpu.stock_.load(std::memory_order_relaxed)->raw_deallocate(block);
  }
}

}  // namespace

// -- What Python calls -----------------------------------------------------------------------------------------------

// The core to use, and the ordinal of its device. False where the table is of another version than this file.
BALLONET_EXPORT bool ballonet_companion_init(const BallonetCore* table, int device) {
  if (table->version != kBallonetCoreVersion) return false;
  core = table;
  ordinal = device;
  return true;
}

BALLONET_EXPORT bool ballonet_cpu_install() { return cpu.install(); }
BALLONET_EXPORT void ballonet_cpu_pause() { cpu.pause(); }
BALLONET_EXPORT bool ballonet_cpu_restore() { return cpu.restore(); }

// Between the two this thread's allocations come from the stock allocator. They nest.
BALLONET_EXPORT void ballonet_cpu_stock_begin() { cpu.stock_begin(); }
BALLONET_EXPORT void ballonet_cpu_stock_end() { cpu.stock_end(); }

// -- What torch's CUDAPluggableAllocator calls -----------------------------------------------------------------------

BALLONET_EXPORT void* ballonet_cuda_alloc(std::size_t size, int device, void* stream) {
  return size == 0 ? nullptr : take(size, device, stream);
}

// A segment for torch's own caching allocator (torch.cuda.MemPool), to which a null pointer is memory that ran out: it
// gives back what it caches and asks once more.
BALLONET_EXPORT void* ballonet_cuda_segment(std::size_t size, int device, void* stream) {
  void* block = nullptr;
  const int failed = size == 0 ? 0 : core->allocate(size, device, stream, &block);
  if (failed && failed != BALLONET_EXHAUSTED) fail(failed);
  return block;
}
