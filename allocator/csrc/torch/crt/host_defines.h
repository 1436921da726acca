// The keywords of CUDA C++ that CUDA's runtime headers use, for a C++ compiler on the host.
//
// pip's torch brings those headers (nvidia-cuda-runtime), but not the folder crt/ that they include, which comes with
// nvcc. Found last (-idirafter): where a toolkit has the real file, that one is taken.
#pragma once

#define __align__(n) __attribute__((aligned(n)))
#define __builtin_align__(n) __align__(n)
#define __host__
#define __device__
#define __global__
#define __device_builtin__
#define __device_builtin_surface_type__
#define __device_builtin_texture_type__
#define __cudart_builtin__
#define CUDARTAPI
#define CUDARTAPI_CDECL
