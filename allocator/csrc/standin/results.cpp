#include "results.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <iterator>

namespace ballonet::standin {

namespace {
thread_local char message[768];
}

CUresult refuse(CUresult code, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(message, sizeof message, format, arguments);
  va_end(arguments);
  return code;
}

const char* refusal() { return message; }

namespace {

struct ResultText {
  CUresult result;
  const char *name, *meaning;
};

constexpr ResultText kResults[] = {
    {cuda::kSuccess, "CUDA_SUCCESS", "no error"},
    {cuda::kInvalidValue, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {cuda::kOutOfMemory, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {cuda::kNotInitialized, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {cuda::kInvalidDevice, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {cuda::kInvalidContext, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {cuda::kAlreadyMapped, "CUDA_ERROR_ALREADY_MAPPED", "resource already mapped"},
    {cuda::kNotMapped, "CUDA_ERROR_NOT_MAPPED", "resource not mapped"},
    {cuda::kInvalidHandle, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {cuda::kIllegalState, "CUDA_ERROR_ILLEGAL_STATE", "the operation cannot be performed in the present state"},
    {cuda::kOperatingSystem, "CUDA_ERROR_OPERATING_SYSTEM", "OS call failed or operation not supported on this OS"},
    {cuda::kNotReady, "CUDA_ERROR_NOT_READY", "device not ready"},
    {cuda::kIllegalAddress, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {cuda::kAlreadyRegistered, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
     "part or all of the requested memory range is already mapped"},
    {cuda::kNotRegistered, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
     "pointer does not correspond to a registered memory region"},
    {cuda::kNotPermitted, "CUDA_ERROR_NOT_PERMITTED", "operation not permitted"},
    {cuda::kNotSupported, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {cuda::kStreamCaptureUnsupported, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
     "operation not permitted when stream is capturing"},
    {cuda::kStreamCaptureImplicit, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT",
     "operation would make the legacy stream depend on a capturing blocking stream"},
    {cuda::kCapturedEvent, "CUDA_ERROR_CAPTURED_EVENT",
     "operation not permitted on an event last recorded in a capturing stream"},
    {100, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {209, "CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image is available for execution on the device"},
    {710, "CUDA_ERROR_ASSERT", "device-side assert triggered"},
    {901, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", "operation failed due to a previous error during capture"},
    {902, "CUDA_ERROR_STREAM_CAPTURE_MERGE", "operation would result in a merge of separate capture sequences"},
    {903, "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED", "capture was not ended in the same stream as it began"},
    {904, "CUDA_ERROR_STREAM_CAPTURE_UNJOINED", "capturing stream has unjoined work"},
    {905, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION", "dependency created on uncaptured work in another stream"},
    {908, "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD",
     "attempt to terminate a thread-local capture sequence from another thread"},
    {cuda::kUnknown, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

bool find(CUresult result, const char* ResultText::* part, const char** text) {
  const auto* found = std::find_if(std::begin(kResults), std::end(kResults),
                                   [result](const ResultText& entry) { return entry.result == result; });
  *text = found == std::end(kResults) ? nullptr : found->*part;
  return *text != nullptr;
}

}  // namespace

bool result_name(CUresult result, const char** name) { return find(result, &ResultText::name, name); }

bool result_text(CUresult result, const char** text) { return find(result, &ResultText::meaning, text); }

}  // namespace ballonet::standin
