// The C interface that torch's allocators call. The companion, which links torch, reaches the core through this table
// only, so that core and companion can be compiled apart.
//
// Guarantees: no exception leaves a function of the table, but where it says so.
//
// Lock: none needed; each function takes those of the core that it needs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>

extern "C" {

// Why an allocation failed: the memory does not suffice; anything else; an earlier kernel damaged the context, and
// every call of the driver fails from then on.
enum { BALLONET_EXHAUSTED = 1, BALLONET_FAILED = 2, BALLONET_BROKEN = 3 };

// A torch memory pool (a CUDA graph's private pool, or torch.cuda.MemPool): c10::MempoolId_t.
using BallonetPool = std::pair<unsigned long long, unsigned long long>;

// A block of the heap: handed out, or free.
struct BallonetBlock {
  std::uint64_t address, size, requested;
  void* stream;
  BallonetPool pool;
  bool allocated;  // handed out
  bool active;     // that, or given back and not yet passed on every stream that used it
  bool shared;     // used on other streams than its own
};

// A stretch of addresses with pages behind it, and its blocks. Pages of weights and KV are segments of one block; free
// pages, which no address leads to for good, are one segment at address 0.
struct BallonetSegment {
  std::uint64_t address, size;
  void* stream;
  BallonetPool pool;
  bool small;
  const BallonetBlock* blocks;
  std::size_t count;
};

// One of torch's statistics, and all of them; each for all blocks, for those of small arenas and for the others.
struct BallonetFigure {
  std::int64_t current, peak, allocated, freed;
};
enum { BALLONET_ALL, BALLONET_SMALL, BALLONET_LARGE, BALLONET_CLASSES };
struct BallonetStats {
  BallonetFigure allocation[BALLONET_CLASSES], segment[BALLONET_CLASSES], active[BALLONET_CLASSES],
      inactive_split[BALLONET_CLASSES], allocated_bytes[BALLONET_CLASSES], reserved_bytes[BALLONET_CLASSES],
      active_bytes[BALLONET_CLASSES], inactive_split_bytes[BALLONET_CLASSES], requested_bytes[BALLONET_CLASSES];
  std::int64_t num_alloc_retries, num_ooms, num_sync_all_streams, num_device_alloc, num_device_free;
};

// Callbacks, under the heap's lock, for what the heap does by itself.
struct BallonetObserver {
  using Told = void (*)(std::uint64_t address, std::uint64_t size, void* stream, BallonetPool pool);
  Told mapped, unmapped;  // pages behind addresses
  Told passed;            // a block that was given back waited for streams and is free now
};

struct BallonetCore {
  std::uint32_t version;  // of this table: kBallonetCoreVersion

  // Allocates `size` > 0 bytes for `stream` of device `device`. Returns 0 and sets *out, or leaves it alone and returns
  // one of the codes above; `last_error` then says why. Callable from any thread, with or without the GIL.
  int (*allocate)(std::size_t size, int device, void* stream, void** out);
  // Gives a block back. Unknown pointers are ignored (after a fork a child frees what its parent allocated), and false.
  // Never throws.
  bool (*deallocate)(void* pointer);
  // Notes that the block is also used on `stream`: it is reused only after that stream's present work has passed.
  void (*record_stream)(void* pointer, void* stream);
  // Returns cached memory to the pool (torch.cuda.empty_cache).
  void (*trim)(int device);
  // Is `pointer` inside memory that this core hands out? By address alone, so also in the child of a fork.
  bool (*owns)(const void* pointer);
  // False in the child of a fork and once the device was closed: the caller then uses torch's own allocator.
  bool (*serving)();
  // This thread's last failure, valid until its next call, and the driver's code, 0 where it was not the driver's.
  const char* (*last_error)();
  int (*last_code)();

  // What follows is for the whole contract of a CUDA allocator of torch's. Functions that return int do so as
  // `allocate` does; the others do nothing, or answer with nothing, where no device is bound to the ordinal.

  // See Note [Pools of CUDA graphs] in entry.cpp. These three may throw.
  void (*begin_pool)(int device, BallonetPool pool, std::function<bool(void* stream)> filter);
  void (*end_pool)(int device, BallonetPool pool);
  void (*release_pool)(int device, BallonetPool pool);
  // Adds a user: a pool must be released as often as it was held or begun before its pages may go.
  void (*hold_pool)(int device, BallonetPool pool);
  int (*pool_users)(int device, BallonetPool pool);
  // May allocations that fit nowhere else lie in free blocks of this pool?
  void (*set_use_on_oom)(int device, BallonetPool pool, bool use);
  // Which blocks of the pool live, to be put back later. nullptr where there is no such pool; `last_error` says so.
  const void* (*checkpoint)(int device, BallonetPool pool);
  void (*forget_checkpoint)(const void* state);
  // Frees the live blocks of the pool and hands out those of the checkpoint, at the same addresses. Calls back for
  // each.
  int (*restore_checkpoint)(int device, const void* state, void* context, void (*freed)(void* context, void* block),
                            void (*created)(void* context, void* block));

  // The live block that begins there. False where there is none.
  bool (*find)(const void* pointer, BallonetBlock* out);
  void (*segments)(int device, void* context, void (*each)(void* context, const BallonetSegment* segment));
  void (*observe)(int device, const BallonetObserver* observer);  // nullptr: none
  void (*stats)(int device, BallonetStats* out);
  void (*reset_peaks)(int device);
  void (*reset_accumulated)(int device);
  // Free bytes, and all; the largest free backed block.
  int (*memory_info)(int device, std::size_t* free, std::size_t* total);
  std::size_t (*largest_free)(int device);
  // The share of the device's memory beyond which no page is created, whatever the budget is.
  double (*fraction)(int device);
  void (*set_fraction)(int device, double fraction);
};

}  // extern "C"

constexpr std::uint32_t kBallonetCoreVersion = 2;
