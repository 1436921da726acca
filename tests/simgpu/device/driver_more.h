// What the simulated libcuda exports beyond the functions that ballonet calls: those under torch's libcudart, and a few
// that torch asks for by name. Signatures are the driver's; handles that nobody follows are void pointers.
#pragma once

#include "driver/driver_abi.h"

using SimGraph = void*;
using SimExec = void*;
using SimNode = const void*;
using SimHostFunction = void (*)(void*);

// X(symbol, parameters...)
// clang-format off
#define SIMGPU_DRIVER_FUNCTIONS(X)                                                                             \
  X(cuCtxGetDevice,               CUdevice*)                                                                   \
  X(cuCtxGetStreamPriorityRange,  int*, int*)                                                                  \
  X(cuMemAlloc_v2,                CUdeviceptr*, std::size_t)                                                   \
  X(cuMemFree_v2,                 CUdeviceptr)                                                                 \
  X(cuMemHostAlloc,               void**, std::size_t, unsigned)                                               \
  X(cuMemFreeHost,                void*)                                                                       \
  X(cuMemGetAddressRange_v2,      CUdeviceptr*, std::size_t*, CUdeviceptr)                                     \
  X(cuPointerGetAttribute,        void*, int, CUdeviceptr)                                                     \
  X(cuMemcpy,                     CUdeviceptr, CUdeviceptr, std::size_t)                                       \
  X(cuMemsetD8_v2,                CUdeviceptr, unsigned char, std::size_t)                                     \
  X(cuStreamCreateWithPriority,   CUstream*, unsigned, int)                                                    \
  X(cuStreamGetPriority,          CUstream, int*)                                                              \
  X(cuStreamQuery,                CUstream)                                                                    \
  X(cuLaunchHostFunc,             CUstream, SimHostFunction, void*)                                            \
  X(cuEventRecordWithFlags,       CUevent, CUstream, unsigned)                                                 \
  X(cuEventElapsedTime,           float*, CUevent, CUevent)                                                    \
  X(cuStreamBeginCapture_v2,      CUstream, int)                                                               \
  X(cuStreamEndCapture,           CUstream, SimGraph*)                                                         \
  X(cuStreamGetCaptureInfo_v3,    CUstream, int*, std::uint64_t*, SimGraph*, const SimNode**, const void**, std::size_t*) \
  X(cuGraphInstantiateWithFlags,  SimExec*, SimGraph, unsigned long long)                                      \
  X(cuGraphLaunch,                SimExec, CUstream)                                                           \
  X(cuGraphExecDestroy,           SimExec)                                                                     \
  X(cuGraphDestroy,               SimGraph)                                                                    \
  X(cuGraphGetNodes,              SimGraph, SimNode*, std::size_t*)

// These answer 801: no kernel of a GPU runs here.
#define SIMGPU_UNSUPPORTED_FUNCTIONS(X)                                                                        \
  X(cuFuncGetAttribute) X(cuFuncSetAttribute) X(cuFuncSetCacheConfig) X(cuLaunchCooperativeKernel)             \
  X(cuLaunchKernel) X(cuLaunchKernelEx) X(cuLinkAddData_v2) X(cuLinkComplete) X(cuLinkCreate_v2) X(cuLinkDestroy) \
  X(cuModuleGetFunction) X(cuModuleGetGlobal_v2) X(cuModuleLoad) X(cuModuleLoadData) X(cuModuleLoadDataEx)     \
  X(cuModuleUnload) X(cuOccupancyMaxActiveBlocksPerMultiprocessor) X(cuTensorMapEncodeTiled)                   \
  X(cuMemExportToShareableHandle) X(cuMemImportFromShareableHandle) X(simgpu_unsupported)
// clang-format on

#define SIMGPU_EXPORT(name, symbol, ...) \
  extern "C" __attribute__((visibility("default"))) CUresult name(__VA_ARGS__) __asm__(symbol);
#define SIMGPU_EXPORT_MORE(name, ...) extern "C" __attribute__((visibility("default"))) CUresult name(__VA_ARGS__);
BALLONET_DRIVER_FUNCTIONS(SIMGPU_EXPORT)
SIMGPU_DRIVER_FUNCTIONS(SIMGPU_EXPORT_MORE)
SIMGPU_UNSUPPORTED_FUNCTIONS(SIMGPU_EXPORT_MORE)
