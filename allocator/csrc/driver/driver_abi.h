// The part of the CUDA driver's binary interface that ballonet uses, written out so that no toolkit is needed to build.
//
// Every driver is reached through this list: NVIDIA's libcuda.so.1, or the host stand-in, which exports the same
// symbols. `tests/contract` checks the layouts against a toolkit's cuda.h where the machine has one.
//
// Words
//   handle   physical memory made by cuMemCreate; has no address
//   mapping  a handle placed at an address by cuMemMap; inaccessible until cuMemSetAccess
//
// Lock: none; these are declarations.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {

using CUresult = int;
using CUdevice = int;
using CUdeviceptr = unsigned long long;
using CUmemGenericAllocationHandle = unsigned long long;
using CUcontext = struct CUctx_st*;
using CUstream = struct CUstream_st*;
using CUevent = struct CUevent_st*;

struct CUmemLocation {
  int type;
  int id;
};

struct CUmemAllocationProp {
  int type;
  int requestedHandleTypes;
  CUmemLocation location;
  void* win32HandleMetaData;
  struct {
    unsigned char compressionType;
    unsigned char gpuDirectRDMACapable;
    unsigned short usage;
    unsigned char reserved[4];
  } allocFlags;
};

struct CUmemAccessDesc {
  CUmemLocation location;
  int flags;
};

}  // extern "C"

static_assert(sizeof(CUmemAllocationProp) == 32, "layout of CUmemAllocationProp");
static_assert(sizeof(CUmemAccessDesc) == 12, "layout of CUmemAccessDesc");

namespace ballonet::cuda {

enum Result : CUresult {
  kSuccess = 0,
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kNotInitialized = 3,
  kNoDevice = 100,
  kInvalidDevice = 101,
  kInvalidContext = 201,
  kAlreadyMapped = 208,
  kNotMapped = 211,
  kOperatingSystem = 304,
  kInvalidHandle = 400,
  kIllegalState = 401,
  kNotReady = 600,
  kIllegalAddress = 700,
  kContextIsDestroyed = 709,
  kAlreadyRegistered = 712,
  kNotRegistered = 713,
  kNotPermitted = 800,
  kNotSupported = 801,
  kSystemDriverMismatch = 803,
  kCompatNotSupported = 804,
  kStreamCaptureUnsupported = 900,
  kStreamCaptureImplicit = 906,
  kCapturedEvent = 907,
  kUnknown = 999,
};

// After these the context fails every call, whatever it asks for (illegal addresses, failed launches, ...).
constexpr bool is_sticky(CUresult code) { return code == 4 || (code >= 700 && code <= 720) || code == kUnknown; }

// CU_STREAM_LEGACY and CU_STREAM_PER_THREAD: handles that name a stream of the process, and one of each thread.
inline const CUstream kLegacyStream = reinterpret_cast<CUstream>(std::uintptr_t{1});
inline const CUstream kPerThreadStream = reinterpret_cast<CUstream>(std::uintptr_t{2});

constexpr const char* kPlatform = "CUDA";  // in torch's out-of-memory error, by which programs recognise it
constexpr int kDLPackDevice = 2;           // kDLCUDA: what DLPack calls memory of the device

constexpr int kAllocationPinned = 1;         // CU_MEM_ALLOCATION_TYPE_PINNED
constexpr int kHandleNone = 0;               // CU_MEM_HANDLE_TYPE_NONE
constexpr int kHandlePosixFd = 1;            // CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
constexpr int kLocationDevice = 1;           // CU_MEM_LOCATION_TYPE_DEVICE
constexpr int kLocationHostNuma = 3;         // CU_MEM_LOCATION_TYPE_HOST_NUMA
constexpr int kAccessReadWrite = 3;          // CU_MEM_ACCESS_FLAGS_PROT_READWRITE
constexpr int kGranularityMinimum = 0;       // CU_MEM_ALLOC_GRANULARITY_MINIMUM
constexpr unsigned kEventDisableTiming = 2;  // CU_EVENT_DISABLE_TIMING
constexpr unsigned kStreamNonBlocking = 1;   // CU_STREAM_NON_BLOCKING
constexpr unsigned kRegisterReadOnly = 8;    // CU_MEMHOSTREGISTER_READ_ONLY
constexpr int kCaptureNone = 0;              // CU_STREAM_CAPTURE_STATUS_NONE
constexpr int kCaptureModeRelaxed = 2;       // CU_STREAM_CAPTURE_MODE_RELAXED

enum Attribute : int {
  kAttributeIntegrated = 18,
  kAttributeComputeMajor = 75,
  kAttributeComputeMinor = 76,
  kAttributeVirtualMemory = 102,
  kAttributePosixFd = 103,
  kAttributeRdmaVirtualMemory = 110,
  kAttributeReadOnlyRegister = 113,
  kAttributeHostNumaId = 134,
  kAttributeHostNumaVirtualMemory = 141,
};

}  // namespace ballonet::cuda

// X(name, symbol, parameters...): the name used here, the symbol looked up in the library, the parameter types.
// clang-format off
#define BALLONET_DRIVER_FUNCTIONS(X)                                                                                  \
  X(cuInit,                        "cuInit",                        unsigned)                                         \
  X(cuDriverGetVersion,            "cuDriverGetVersion",            int*)                                             \
  X(cuDeviceGetCount,              "cuDeviceGetCount",              int*)                                             \
  X(cuDeviceGet,                   "cuDeviceGet",                   CUdevice*, int)                                   \
  X(cuDeviceGetName,               "cuDeviceGetName",               char*, int, CUdevice)                             \
  X(cuDeviceGetAttribute,          "cuDeviceGetAttribute",          int*, int, CUdevice)                              \
  X(cuDeviceCanAccessPeer,         "cuDeviceCanAccessPeer",         int*, CUdevice, CUdevice)                         \
  X(cuDeviceTotalMem,              "cuDeviceTotalMem_v2",           std::size_t*, CUdevice)                           \
  X(cuDevicePrimaryCtxRetain,      "cuDevicePrimaryCtxRetain",      CUcontext*, CUdevice)                             \
  X(cuDevicePrimaryCtxRelease,     "cuDevicePrimaryCtxRelease_v2",  CUdevice)                                         \
  X(cuDevicePrimaryCtxGetState,    "cuDevicePrimaryCtxGetState",    CUdevice, unsigned*, int*)                        \
  X(cuCtxSetCurrent,               "cuCtxSetCurrent",               CUcontext)                                        \
  X(cuCtxGetCurrent,               "cuCtxGetCurrent",               CUcontext*)                                       \
  X(cuCtxSynchronize,              "cuCtxSynchronize")                                                                \
  X(cuMemGetInfo,                  "cuMemGetInfo_v2",               std::size_t*, std::size_t*)                       \
  X(cuMemGetAllocationGranularity, "cuMemGetAllocationGranularity", std::size_t*, const CUmemAllocationProp*, int)    \
  X(cuMemAddressReserve,           "cuMemAddressReserve",           CUdeviceptr*, std::size_t, std::size_t, CUdeviceptr, unsigned long long) \
  X(cuMemAddressFree,              "cuMemAddressFree",              CUdeviceptr, std::size_t)                         \
  X(cuMemCreate,                   "cuMemCreate",                   CUmemGenericAllocationHandle*, std::size_t, const CUmemAllocationProp*, unsigned long long) \
  X(cuMemRelease,                  "cuMemRelease",                  CUmemGenericAllocationHandle)                     \
  X(cuMemMap,                      "cuMemMap",                      CUdeviceptr, std::size_t, std::size_t, CUmemGenericAllocationHandle, unsigned long long) \
  X(cuMemUnmap,                    "cuMemUnmap",                    CUdeviceptr, std::size_t)                         \
  X(cuMemSetAccess,                "cuMemSetAccess",                CUdeviceptr, std::size_t, const CUmemAccessDesc*, std::size_t) \
  X(cuMemHostRegister,             "cuMemHostRegister_v2",          void*, std::size_t, unsigned)                     \
  X(cuMemHostUnregister,           "cuMemHostUnregister",           void*)                                            \
  X(cuMemcpyHtoD,                  "cuMemcpyHtoD_v2",               CUdeviceptr, const void*, std::size_t)            \
  X(cuMemcpyDtoH,                  "cuMemcpyDtoH_v2",               void*, CUdeviceptr, std::size_t)                  \
  X(cuMemcpyAsync,                 "cuMemcpyAsync",                 CUdeviceptr, CUdeviceptr, std::size_t, CUstream)  \
  X(cuMemsetD8Async,               "cuMemsetD8Async",               CUdeviceptr, unsigned char, std::size_t, CUstream) \
  X(cuEventCreate,                 "cuEventCreate",                 CUevent*, unsigned)                               \
  X(cuEventDestroy,                "cuEventDestroy_v2",             CUevent)                                          \
  X(cuEventRecord,                 "cuEventRecord",                 CUevent, CUstream)                                \
  X(cuEventQuery,                  "cuEventQuery",                  CUevent)                                          \
  X(cuEventSynchronize,            "cuEventSynchronize",            CUevent)                                          \
  X(cuStreamCreate,                "cuStreamCreate",                CUstream*, unsigned)                              \
  X(cuStreamDestroy,               "cuStreamDestroy_v2",            CUstream)                                         \
  X(cuStreamWaitEvent,             "cuStreamWaitEvent",             CUstream, CUevent, unsigned)                      \
  X(cuStreamSynchronize,           "cuStreamSynchronize",           CUstream)                                         \
  X(cuStreamIsCapturing,           "cuStreamIsCapturing",           CUstream, int*)                                   \
  X(cuThreadExchangeStreamCaptureMode, "cuThreadExchangeStreamCaptureMode", int*)                                     \
  X(cuGetErrorName,                "cuGetErrorName",                CUresult, const char**)                           \
  X(cuGetErrorString,              "cuGetErrorString",              CUresult, const char**)
// clang-format on

// What the host stand-in exports beyond the driver's own symbols. A library that exports the first is a stand-in.
extern "C" {
struct BallonetStandinConfig {
  std::uint64_t device_bytes;     // total memory of the pretended device
  std::uint64_t link_bandwidth;   // bytes per second of host-device copies; 0 = as fast as memory
  std::uint64_t link_latency_ns;  // added to every host-device copy; 2^64-1 = none begins before this changes
  std::uint64_t peer_bandwidth;   // bytes per second of copies between the two devices; 0 = as fast as memory
  int unbacked;                   // 1: pages of the device take memory when they are written to, and not before
};
}
// X(name, symbol, parameters...)
//   ballonet_standin_configure  sets the figures above; may be called before cuInit and again at any time
//   ballonet_standin_use        the caller says that work submitted to `stream` reads (write = 0) or writes [ptr,
//   ptr+size)
//   ballonet_standin_idle       for the next fork only: nobody needs the bytes of [ptr, ptr+size), so the child gets
//   zeros there and no copy
//   ballonet_standin_hold       a mapping can be read while another one takes its place, until held = 0
//   ballonet_standin_violation  copies the newest message of the order checker or of a strict refusal on this thread
//   ballonet_standin_memfds     the descriptors of the memfds `ballonet-device`, `ballonet-host`, `ballonet-peer`
// clang-format off
#define BALLONET_STANDIN_FUNCTIONS(X)                                                                                 \
  X(ballonet_standin_configure,  "ballonet_standin_configure",  const BallonetStandinConfig*)                         \
  X(ballonet_standin_use,        "ballonet_standin_use",        CUdeviceptr, std::size_t, CUstream, int)              \
  X(ballonet_standin_idle,       "ballonet_standin_idle",       CUdeviceptr, std::size_t)                             \
  X(ballonet_standin_hold,       "ballonet_standin_hold",       CUdeviceptr, std::size_t, int)                        \
  X(ballonet_standin_violation,  "ballonet_standin_violation",  char*, std::size_t)                                   \
  X(ballonet_standin_memfds,     "ballonet_standin_memfds",     int*, int*, int*)
// clang-format on
