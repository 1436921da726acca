// The C surface that torch's allocators call. Whoever links torch (the companion) reaches the core through this table
// and nothing else, so that core and companion can be compiled apart.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {

// A torch memory pool (a CUDA graph's private pool, or torch.cuda.MemPool).
struct BallonetMempool {
  std::uint64_t first;
  std::uint64_t second;
};

// Says whether an allocation on this stream belongs to the pool being filled.
using BallonetStreamFilter = bool (*)(void* context, void* stream);

enum { BALLONET_EXHAUSTED = 1 };

struct BallonetCore {
  std::uint32_t version;  // of this table: kBallonetCoreVersion

  // Allocates `size` > 0 bytes for `stream` of device `device`. Returns 0 and sets *out, or leaves it alone and returns
  // BALLONET_EXHAUSTED when the memory does not suffice, 2 on any other failure; `last_error` then says why. Callable
  // from any thread, with or without the GIL.
  int (*allocate)(std::size_t size, int device, void* stream, void** out);
  // Gives a block back. Unknown pointers are ignored (after a fork a child frees what its parent allocated). Never
  // throws.
  void (*deallocate)(void* pointer);
  // The block is also used on `stream`: it is reused only after that stream's present work has passed.
  void (*record_stream)(void* pointer, void* stream);
  // Returns cached memory to the pool (torch.cuda.empty_cache).
  void (*trim)(int device);
  // From now on allocations of `device` for which the filter holds come from `pool`; until end_pool. The filter is
  // copied by the caller and stays valid until end_pool returns.
  void (*begin_pool)(int device, BallonetMempool pool, BallonetStreamFilter filter, void* context);
  void (*end_pool)(int device, BallonetMempool pool);
  void (*release_pool)(int device, BallonetMempool pool);
  // Is `pointer` inside memory that this core hands out? By address alone, so also in the child of a fork.
  bool (*owns)(const void* pointer);
  // False in the child of a fork and once the device was closed: the caller then uses torch's own allocator.
  bool (*serving)();
  // This thread's last failure; valid until its next call.
  const char* (*last_error)();
};

}  // extern "C"

constexpr std::uint32_t kBallonetCoreVersion = 1;
