// libcudart: memory, copies and fills.
#include <cstring>

#include "runtime.h"

using namespace simgpu;

namespace {

enum Kind { kHostToHost, kHostToDevice, kDeviceToHost, kDeviceToDevice, kDefault };

// What the documentation leaves undefined: kinds that are not what the pointers say. Said once, then the pointers
// count.
void check_kind(const void* to, const void* from, int kind) {
  static bool said = false;
  if (said || kind == kDefault) return;
  const auto on_device = [](const void* pointer) {
    unsigned type = 0;
    constexpr int kMemoryType = 2;
    return cuPointerGetAttribute(&type, kMemoryType, number(pointer)) == 0 && type == 2;
  };
  const bool to_device = kind == kHostToDevice || kind == kDeviceToDevice;
  const bool from_device = kind == kDeviceToHost || kind == kDeviceToDevice;
  if (on_device(to) == to_device && on_device(from) == from_device) return;
  said = true;
  simgpu_note("a copy's kind is not what its pointers say (host pages that are mapped for a device?)");
}

}  // namespace

SIMGPU_RUNTIME Error cudaMalloc(void** pointer, std::size_t size) {
  *pointer = nullptr;
  if (size == 0) return 0;
  return with_context([&] {
    CUdeviceptr made = 0;
    const Error failed = cuMemAlloc_v2(&made, size);
    if (failed == 0) *pointer = reinterpret_cast<void*>(made);
    return failed;
  });
}

SIMGPU_RUNTIME Error cudaFree(void* pointer) {
  return with_context([&] { return pointer == nullptr ? 0 : cuMemFree_v2(number(pointer)); });
}

SIMGPU_RUNTIME Error cudaHostAlloc(void** pointer, std::size_t size, unsigned flags) {
  *pointer = nullptr;
  return size == 0 ? 0 : with_context([&] { return cuMemHostAlloc(pointer, size, flags); });
}

SIMGPU_RUNTIME Error cudaMallocHost(void** pointer, std::size_t size) { return cudaHostAlloc(pointer, size, 0); }

SIMGPU_RUNTIME Error cudaFreeHost(void* pointer) {
  return with_context([&] { return pointer == nullptr ? 0 : cuMemFreeHost(pointer); });
}

SIMGPU_RUNTIME Error cudaHostRegister(void* pointer, std::size_t size, unsigned flags) {
  return with_context([&] { return cuMemHostRegister(pointer, size, flags); });
}

SIMGPU_RUNTIME Error cudaHostUnregister(void* pointer) {
  return with_context([&] { return cuMemHostUnregister(pointer); });
}

SIMGPU_RUNTIME Error cudaMemGetInfo(std::size_t* free, std::size_t* total) {
  return with_context([&] { return cuMemGetInfo(free, total); });
}

struct PointerAttributes {
  int type, device;  // 0 unregistered, 1 host, 2 device
  void *device_pointer, *host_pointer;
  long reserved[8];
};

SIMGPU_RUNTIME Error cudaPointerGetAttributes(PointerAttributes* attributes, const void* pointer) {
  *attributes = PointerAttributes{};
  attributes->device = -2;  // cudaInvalidDeviceId
  return with_context([&] {
    unsigned type = 0;
    if (cuPointerGetAttribute(&type, 2, number(pointer)) != 0) {
      attributes->host_pointer = const_cast<void*>(pointer);
      return 0;
    }
    attributes->type = static_cast<int>(type);
    attributes->device_pointer = const_cast<void*>(pointer);
    if (type == 1) attributes->host_pointer = const_cast<void*>(pointer);
    return cuPointerGetAttribute(&attributes->device, 9, number(pointer));
  });
}

SIMGPU_RUNTIME Error cudaMemcpyAsync(void* to, const void* from, std::size_t size, int kind, StreamHandle stream) {
  return with_context([&] {
    check_kind(to, from, kind);
    return cuMemcpyAsync(number(to), number(from), size, stream);
  });
}

SIMGPU_RUNTIME Error cudaMemcpy(void* to, const void* from, std::size_t size, int kind) {
  return with_context([&] {
    check_kind(to, from, kind);
    return cuMemcpy(number(to), number(from), size);
  });
}

SIMGPU_RUNTIME Error cudaMemcpyPeerAsync(void* to, int, const void* from, int, std::size_t size, StreamHandle stream) {
  return cudaMemcpyAsync(to, from, size, kDefault, stream);
}

SIMGPU_RUNTIME Error cudaMemcpy2DAsync(void* to, std::size_t to_pitch, const void* from, std::size_t from_pitch,
                                       std::size_t width, std::size_t height, int kind, StreamHandle stream) {
  Error failed = 0;
  for (std::size_t row = 0; failed == 0 && row < height; ++row) {
    failed = cudaMemcpyAsync(static_cast<char*>(to) + row * to_pitch, static_cast<const char*>(from) + row * from_pitch,
                             width, kind, stream);
  }
  return failed;
}

SIMGPU_RUNTIME Error cudaMemsetAsync(void* to, int value, std::size_t size, StreamHandle stream) {
  return with_context([&] { return cuMemsetD8Async(number(to), static_cast<unsigned char>(value), size, stream); });
}

SIMGPU_RUNTIME Error cudaMemset(void* to, int value, std::size_t size) {
  return cudaMemsetAsync(to, value, size, nullptr);
}

SIMGPU_RUNTIME Error cudaDeviceGetGraphMemAttribute(int, int, void* value) {
  std::memset(value, 0, sizeof(std::uint64_t));
  return 0;
}

SIMGPU_RUNTIME Error cudaDeviceSetGraphMemAttribute(int, int, void*) { return 0; }
