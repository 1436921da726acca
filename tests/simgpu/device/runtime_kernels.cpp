// libcudart: kernels of a GPU, which cannot run here. They are registered by name, so that a launch can say which one
// nothing emulates; and what torch never needs on this device.
#include <cstring>
#include <mutex>
#include <string>
#include <unordered_map>

#include "runtime.h"

using namespace simgpu;

namespace {

struct Dimensions {
  unsigned x, y, z;
};

std::mutex* const mutex = new std::mutex;
auto* const kernels = new std::unordered_map<const void*, const char*>;  // the host's function -> its name

Error refuse_launch(const void* function) {
  constexpr Error kNoImage = 209;
  const std::lock_guard<std::mutex> lock(*mutex);
  const auto found = kernels->find(function);
  const std::string name = found == kernels->end() ? "(unknown)" : found->second;
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

SIMGPU_RUNTIME unsigned __cudaPushCallConfiguration(Dimensions, Dimensions, std::size_t, void*) { return 0; }

SIMGPU_RUNTIME Error __cudaPopCallConfiguration(Dimensions* grid, Dimensions* block, std::size_t* shared,
                                                StreamHandle* stream) {
  *grid = *block = Dimensions{1, 1, 1};
  *shared = 0;
  *stream = nullptr;
  return 0;
}

SIMGPU_RUNTIME Error __cudaGetKernel(const void** kernel, const void* function) {
  *kernel = function;
  return 0;
}

SIMGPU_RUNTIME Error __cudaLaunchKernel(const void* kernel, Dimensions, Dimensions, void**, std::size_t, StreamHandle) {
  return refuse_launch(kernel);
}

SIMGPU_RUNTIME Error cudaLaunchKernel(const void* kernel, Dimensions, Dimensions, void**, std::size_t, StreamHandle) {
  return refuse_launch(kernel);
}

SIMGPU_RUNTIME Error cudaLaunchCooperativeKernel(const void* kernel, Dimensions, Dimensions, void**, std::size_t,
                                                 StreamHandle) {
  return refuse_launch(kernel);
}

SIMGPU_RUNTIME Error cudaLaunchKernelExC(const void*, const void* kernel, void**) { return refuse_launch(kernel); }

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

#define SIMGPU_UNSUPPORTED(name) \
  SIMGPU_RUNTIME Error name() { return remember(801); }
SIMGPU_UNSUPPORTED(cudaDeviceGetDefaultMemPool)
SIMGPU_UNSUPPORTED(cudaFreeAsync)
SIMGPU_UNSUPPORTED(cudaGetSymbolAddress)
SIMGPU_UNSUPPORTED(cudaGraphAddNode)
SIMGPU_UNSUPPORTED(cudaGraphConditionalHandleCreate)
SIMGPU_UNSUPPORTED(cudaIpcCloseMemHandle)
SIMGPU_UNSUPPORTED(cudaIpcGetEventHandle)
SIMGPU_UNSUPPORTED(cudaIpcGetMemHandle)
SIMGPU_UNSUPPORTED(cudaIpcOpenEventHandle)
SIMGPU_UNSUPPORTED(cudaIpcOpenMemHandle)
SIMGPU_UNSUPPORTED(cudaKernelSetAttributeForDevice)
SIMGPU_UNSUPPORTED(cudaLibraryGetGlobal)
SIMGPU_UNSUPPORTED(cudaLibraryGetKernel)
SIMGPU_UNSUPPORTED(cudaLibraryGetKernelCount)
SIMGPU_UNSUPPORTED(cudaLibraryGetManaged)
SIMGPU_UNSUPPORTED(cudaLibraryGetUnifiedFunction)
SIMGPU_UNSUPPORTED(cudaLibraryLoadData)
SIMGPU_UNSUPPORTED(cudaLibraryLoadFromFile)
SIMGPU_UNSUPPORTED(cudaLibraryUnload)
SIMGPU_UNSUPPORTED(cudaMallocAsync)
SIMGPU_UNSUPPORTED(cudaMallocManaged)
SIMGPU_UNSUPPORTED(cudaMemPoolGetAttribute)
SIMGPU_UNSUPPORTED(cudaMemPoolSetAccess)
SIMGPU_UNSUPPORTED(cudaMemPoolSetAttribute)
SIMGPU_UNSUPPORTED(cudaMemPoolTrimTo)
SIMGPU_UNSUPPORTED(cudaMemcpyToSymbol)
SIMGPU_UNSUPPORTED(cudaStreamBeginCaptureToGraph)
SIMGPU_UNSUPPORTED(cudaStreamUpdateCaptureDependencies)
