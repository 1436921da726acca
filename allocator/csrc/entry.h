// The C surface that torch's allocators call. Whoever links torch (the companion) reaches the core through this table
// and nothing else, so that core and companion can be compiled apart.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {

// Why an allocation failed: the memory does not suffice; anything else; an earlier kernel damaged the context, and
// every call of the driver fails from then on.
enum { BALLONET_EXHAUSTED = 1, BALLONET_FAILED = 2, BALLONET_BROKEN = 3 };

struct BallonetCore {
  std::uint32_t version;  // of this table: kBallonetCoreVersion

  // Allocates `size` > 0 bytes for `stream` of device `device`. Returns 0 and sets *out, or leaves it alone and returns
  // one of the codes above; `last_error` then says why. Callable from any thread, with or without the GIL.
  int (*allocate)(std::size_t size, int device, void* stream, void** out);
  // Gives a block back. Unknown pointers are ignored (after a fork a child frees what its parent allocated). Never
  // throws.
  void (*deallocate)(void* pointer);
  // The block is also used on `stream`: it is reused only after that stream's present work has passed.
  void (*record_stream)(void* pointer, void* stream);
  // Returns cached memory to the pool (torch.cuda.empty_cache).
  void (*trim)(int device);
  // Is `pointer` inside memory that this core hands out? By address alone, so also in the child of a fork.
  bool (*owns)(const void* pointer);
  // False in the child of a fork and once the device was closed: the caller then uses torch's own allocator.
  bool (*serving)();
  // This thread's last failure, valid until its next call, and the driver's number for it, 0 where it was none of its.
  const char* (*last_error)();
  int (*last_code)();
};

}  // extern "C"

constexpr std::uint32_t kBallonetCoreVersion = 2;
