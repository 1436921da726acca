// libcudart: kernels of a GPU, which cannot run here. They are registered by name, so that a launch can say which one
// nothing emulates; and what torch never needs on this device.
#include <chrono>
#include <cstring>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>

#include "runtime.h"

using namespace simgpu;

namespace {

struct Dimensions {
  unsigned x, y, z;
};

std::mutex* const mutex = new std::mutex;
auto* const kernels = new std::unordered_map<const void*, const char*>;  // the host's function -> its name

thread_local StreamHandle configured = nullptr;  // the stream between the two halves of <<<...>>>

std::string name_of(const void* function) {
  const std::lock_guard<std::mutex> lock(*mutex);
  const auto found = kernels->find(function);
  return found == kernels->end() ? "(unknown)" : found->second;
}

// torch.cuda._sleep(cycles): keeps the stream busy for that long at 2 GHz.
Error spin(StreamHandle stream, std::int64_t cycles) {
  const auto sleep = [](void* context) {
    const auto ns = static_cast<std::int64_t>(reinterpret_cast<std::intptr_t>(context)) / 2;
    std::this_thread::sleep_for(std::chrono::nanoseconds(ns));
  };
  void* const context = reinterpret_cast<void*>(static_cast<std::intptr_t>(cycles));
  return with_context([&] { return simgpu_launch(stream, "spin_kernel", sleep, nullptr, context, nullptr, 0); });
}

Error launch(const void* function, void** arguments, StreamHandle stream) {
  constexpr Error kNoImage = 209;
  const std::string name = name_of(function);
  if (name.find("11spin_kernelEl") != std::string::npos) {
    return spin(stream, *static_cast<std::int64_t*>(arguments[0]));
  }
  simgpu_note(("a kernel was launched that nothing emulates: " + name).c_str());
  return remember(kNoImage);
}

}  // namespace

SIMGPU_RUNTIME void** __cudaRegisterFatBinary(void* image) { return new void*(image); }
SIMGPU_RUNTIME void __cudaRegisterFatBinaryEnd(void**) {}
SIMGPU_RUNTIME void __cudaUnregisterFatBinary(void** image) { delete image; }
SIMGPU_RUNTIME char __cudaInitModule(void**) { return 1; }
SIMGPU_RUNTIME void __cudaRegisterVar(void**, char*, char*, const char*, int, std::size_t, int, int) {}

SIMGPU_RUNTIME void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, void*, void*, void*,
                                           void*, int*) {
  const std::lock_guard<std::mutex> lock(*mutex);
  kernels->emplace(host, name);
}

SIMGPU_RUNTIME unsigned __cudaPushCallConfiguration(Dimensions, Dimensions, std::size_t, void* stream) {
  configured = static_cast<StreamHandle>(stream);
  return 0;
}

SIMGPU_RUNTIME Error __cudaPopCallConfiguration(Dimensions* grid, Dimensions* block, std::size_t* shared,
                                                StreamHandle* stream) {
  *grid = *block = Dimensions{1, 1, 1};
  *shared = 0;
  *stream = configured;
  return 0;
}

SIMGPU_RUNTIME Error __cudaGetKernel(const void** kernel, const void* function) {
  *kernel = function;
  return 0;
}

SIMGPU_RUNTIME Error __cudaLaunchKernel(const void* kernel, Dimensions, Dimensions, void** arguments, std::size_t,
                                        StreamHandle stream) {
  return launch(kernel, arguments, stream);
}

SIMGPU_RUNTIME Error cudaLaunchKernel(const void* kernel, Dimensions, Dimensions, void** arguments, std::size_t,
                                      StreamHandle stream) {
  return launch(kernel, arguments, stream);
}

SIMGPU_RUNTIME Error cudaLaunchCooperativeKernel(const void* kernel, Dimensions, Dimensions, void** arguments,
                                                 std::size_t, StreamHandle stream) {
  return launch(kernel, arguments, stream);
}

SIMGPU_RUNTIME Error cudaLaunchKernelExC(const void*, const void* kernel, void** arguments) {
  return launch(kernel, arguments, nullptr);
}

SIMGPU_RUNTIME Error cudaFuncGetAttributes(void* attributes, const void*) {
  struct {
    std::size_t shared, constant, local;
    int threads, registers, ptx, binary;
    char rest[144 - 40];
  } values{0, 0, 0, 1024, 32, 80, 80, {}};
  static_assert(sizeof values == 144, "cudaFuncAttributes of CUDA 13");
  std::memcpy(attributes, &values, sizeof values);
  return 0;
}

SIMGPU_RUNTIME Error cudaFuncSetAttribute(const void*, int, int) { return 0; }

SIMGPU_RUNTIME Error cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, std::size_t) {
  *blocks = 1;
  return 0;
}

SIMGPU_RUNTIME Error cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, std::size_t,
                                                                            unsigned) {
  *blocks = 1;
  return 0;
}

// clang-format off
#define SIMGPU_UNSUPPORTED_RUNTIME(X) \
  X(cudaDeviceGetDefaultMemPool) X(cudaFreeAsync) X(cudaGetSymbolAddress) X(cudaGraphAddNode) \
  X(cudaGraphConditionalHandleCreate) X(cudaGraphNodeGetDependencies) X(cudaGraphRetainUserObject) \
  X(cudaIpcCloseMemHandle) X(cudaIpcGetEventHandle) X(cudaIpcGetMemHandle) X(cudaIpcOpenEventHandle) \
  X(cudaIpcOpenMemHandle) X(cudaKernelSetAttributeForDevice) X(cudaLibraryGetGlobal) X(cudaLibraryGetKernel) \
  X(cudaLibraryGetKernelCount) X(cudaLibraryGetManaged) X(cudaLibraryGetUnifiedFunction) X(cudaLibraryLoadData) \
  X(cudaLibraryLoadFromFile) X(cudaLibraryUnload) X(cudaMallocAsync) X(cudaMallocManaged) \
  X(cudaMemPoolGetAttribute) X(cudaMemPoolSetAccess) X(cudaMemPoolSetAttribute) X(cudaMemPoolTrimTo) \
  X(cudaMemcpyToSymbol) X(cudaStreamAddCallback) X(cudaStreamBeginCaptureToGraph) \
  X(cudaStreamUpdateCaptureDependencies) X(cudaUserObjectCreate) X(cudaUserObjectRelease)
// clang-format on
#define SIMGPU_UNSUPPORTED(name) \
  SIMGPU_RUNTIME Error name() { return remember(801); }
SIMGPU_UNSUPPORTED_RUNTIME(SIMGPU_UNSUPPORTED)
