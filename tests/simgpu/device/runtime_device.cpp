// libcudart: devices, errors, properties.
#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <string>

#include "runtime.h"

namespace simgpu {
namespace {

constexpr Error kInvalidValue = 1, kInvalidDevice = 101, kSticky = 700;

thread_local int chosen = 0;
thread_local Error last_error = 0;

Error device_count(int* count) {
  static const Error failed = cuInit(0);
  *count = 0;
  return failed != 0 ? failed : cuDeviceGetCount(count);
}

// The primary context of a device, retained once for the process.
Error context_of(int device, CUcontext* context) {
  static CUcontext retained[2] = {};
  static std::mutex* const mutex = new std::mutex;
  const std::lock_guard<std::mutex> lock(*mutex);
  const Error failed = retained[device] != nullptr ? 0 : cuDevicePrimaryCtxRetain(&retained[device], device);
  *context = retained[device];
  return failed;
}

// A driver's context may have been made current since, by cuCtxSetCurrent: it counts.
Error enter(int device, bool explicitly) {
  int count = 0, current = -1;
  const Error failed = device_count(&count);
  if (failed != 0) return failed;
  if (device < 0 || device >= count) return kInvalidDevice;
  const bool has_context = cuCtxGetDevice(&current) == 0;
  if (has_context && (!explicitly || current == device)) return 0;
  CUcontext context;
  const Error refused = context_of(device, &context);
  return refused != 0 ? refused : cuCtxSetCurrent(context);
}

struct Name {
  Error error;
  const char* text;
};
constexpr Name kNames[] = {
    {0, "cudaSuccess"},
    {1, "cudaErrorInvalidValue"},
    {2, "cudaErrorMemoryAllocation"},
    {3, "cudaErrorInitializationError"},
    {100, "cudaErrorNoDevice"},
    {101, "cudaErrorInvalidDevice"},
    {209, "cudaErrorNoKernelImageForDevice"},
    {400, "cudaErrorInvalidResourceHandle"},
    {600, "cudaErrorNotReady"},
    {700, "cudaErrorIllegalAddress"},
    {712, "cudaErrorHostMemoryAlreadyRegistered"},
    {713, "cudaErrorHostMemoryNotRegistered"},
    {801, "cudaErrorNotSupported"},
    {900, "cudaErrorStreamCaptureUnsupported"},
    {901, "cudaErrorStreamCaptureInvalidated"},
    {904, "cudaErrorStreamCaptureUnjoined"},
    {905, "cudaErrorStreamCaptureIsolation"},
    {906, "cudaErrorStreamCaptureImplicit"},
    {907, "cudaErrorCapturedEvent"},
};

}  // namespace

Error remember(Error error) {
  if (error != 0) last_error = error;
  return error;
}

Error ready() { return enter(chosen, false); }

Error chosen_device(int* device) {
  if (cuCtxGetDevice(device) != 0) *device = chosen;
  return 0;
}

}  // namespace simgpu

using namespace simgpu;

SIMGPU_RUNTIME Error cudaGetLastError() {
  const Error error = last_error;
  if (error != kSticky) last_error = 0;
  return error;
}

SIMGPU_RUNTIME Error cudaPeekAtLastError() { return last_error; }

SIMGPU_RUNTIME const char* cudaGetErrorName(Error error) {
  const Name* const found =
      std::find_if(std::begin(kNames), std::end(kNames), [error](const Name& name) { return name.error == error; });
  return found == std::end(kNames) ? "cudaErrorUnknown" : found->text;
}

SIMGPU_RUNTIME const char* cudaGetErrorString(Error error) {
  const char* text = nullptr;
  return cuGetErrorString(error, &text) == 0 ? text : "unrecognized error code";
}

SIMGPU_RUNTIME Error cudaGetDeviceCount(int* count) { return remember(device_count(count)); }

SIMGPU_RUNTIME Error cudaGetDevice(int* device) { return chosen_device(device); }

SIMGPU_RUNTIME Error cudaSetDevice(int device) {
  const Error failed = enter(device, true);
  if (failed == 0) chosen = device;
  return remember(failed);
}

SIMGPU_RUNTIME Error cudaDeviceSynchronize() {
  return with_context([] { return cuCtxSynchronize(); });
}

SIMGPU_RUNTIME Error cudaDriverGetVersion(int* version) { return cuDriverGetVersion(version); }

SIMGPU_RUNTIME Error cudaRuntimeGetVersion(int* version) {
  *version = 13000;
  return 0;
}

SIMGPU_RUNTIME Error cudaDeviceGetAttribute(int* value, int attribute, int device) {
  int count = 0;
  const Error failed = device_count(&count);
  return remember(failed != 0 ? failed : cuDeviceGetAttribute(value, attribute, device));
}

SIMGPU_RUNTIME Error cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  return with_context([&] { return cuDeviceCanAccessPeer(can, device, peer); });
}

SIMGPU_RUNTIME Error cudaDeviceEnablePeerAccess(int peer, unsigned) {
  int device = 0, can = 0;
  chosen_device(&device);
  const Error failed = cudaDeviceCanAccessPeer(&can, device, peer);
  return failed != 0 || can != 0 ? failed : remember(kInvalidDevice);
}

SIMGPU_RUNTIME Error cudaDeviceGetPCIBusId(char* text, int length, int device) {
  std::snprintf(text, static_cast<std::size_t>(length), "0000:%02x:00.0", device + 1);
  return 0;
}

SIMGPU_RUNTIME Error cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  return cuCtxGetStreamPriorityRange(least, greatest);
}

SIMGPU_RUNTIME Error cudaProfilerStart() { return 0; }
SIMGPU_RUNTIME Error cudaProfilerStop() { return 0; }

// cudaDeviceProp of CUDA 13: 1008 bytes, of which these are set. contract/runtime_calls.py reads them back by name.
SIMGPU_RUNTIME Error cudaGetDeviceProperties(void* properties, int device) {
  int count = 0;
  const Error failed = device_count(&count);
  if (failed != 0 || device < 0 || device >= count) return remember(failed != 0 ? failed : kInvalidDevice);
  auto* const bytes = static_cast<char*>(properties);
  std::memset(bytes, 0, 1008);
  const auto put = [bytes](std::size_t offset, auto value) { std::memcpy(bytes + offset, &value, sizeof value); };
  const auto attribute = [device](int wanted) {
    int value = 0;
    cuDeviceGetAttribute(&value, wanted, device);
    return value;
  };
  cuDeviceGetName(bytes, 256, device);
  put(256 + 15, static_cast<char>(device + 1));  // uuid
  std::size_t memory = 0;
  cuDeviceTotalMem(&memory, device);
  put(288, memory);                     // totalGlobalMem
  put(296, std::size_t(attribute(8)));  // sharedMemPerBlock
  constexpr struct {
    std::size_t offset;
    int attribute;
  } kIntegers[] = {{304, 12}, {308, 10}, {320, 1},  {324, 2},   {328, 3},  {332, 4},  {336, 5},  {340, 6},
                   {344, 7},  {360, 75}, {364, 76}, {384, 16},  {388, 18}, {392, 19}, {560, 31}, {568, 33},
                   {572, 34}, {584, 40}, {588, 41}, {592, 37},  {596, 38}, {604, 39}, {608, 78}, {632, 82},
                   {636, 83}, {656, 89}, {668, 95}, {688, 106}, {704, 99}};
  for (const auto& one : kIntegers) put(one.offset, attribute(one.attribute));
  put(312, std::size_t{2147483647});      // memPitch
  put(352, std::size_t(attribute(9)));    // totalConstMem
  put(368, std::size_t(attribute(14)));   // textureAlignment
  put(624, std::size_t(attribute(81)));   // sharedMemPerMultiprocessor
  put(672, std::size_t(attribute(97)));   // sharedMemPerBlockOptin
  put(696, std::size_t(attribute(111)));  // reservedSharedMemPerBlock
  return 0;
}

// The newest version of a function that libcuda exports; else one that says that it is not supported.
SIMGPU_RUNTIME Error cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned, unsigned long long,
                                                      int* status) {
  static void* const library = [] {
    Dl_info info{};
    ::dladdr(reinterpret_cast<void*>(&cuInit), &info);
    return ::dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
  }();
  *function = nullptr;
  const std::string name = symbol;
  for (const std::string& one : {name + "_v3", name + "_v2", name, std::string("simgpu_unsupported")}) {
    if (*function == nullptr) *function = ::dlsym(library, one.c_str());
  }
  if (status != nullptr) *status = 0;
  return 0;
}
