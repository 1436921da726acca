// How the functions of libcudart get to those of libcuda: a context made on first use, and the last error of a thread.
//
// Error numbers are the driver's: CUDA gives both libraries the same.
#pragma once

#include <cstddef>
#include <cstdint>

#include "driver_more.h"
#include "simgpu.h"

namespace simgpu {

using Error = int;  // cudaError_t
using StreamHandle = CUstream;

Error remember(Error error);  // for cudaGetLastError; returns it
Error ready();                // the chosen device's context becomes current
Error chosen_device(int* device);

// Calls the driver with a context, and remembers how it ended.
template <class Call>
Error with_context(Call call) {
  const Error failed = ready();
  return remember(failed != 0 ? failed : call());
}

inline CUdeviceptr number(const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer); }

}  // namespace simgpu

#define SIMGPU_RUNTIME extern "C" __attribute__((visibility("default")))
