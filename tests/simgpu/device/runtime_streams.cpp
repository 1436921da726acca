// libcudart: streams, events, captures and graphs.
#include <cstdio>

#include "runtime.h"

using namespace simgpu;

SIMGPU_RUNTIME Error cudaStreamCreateWithPriority(StreamHandle* stream, unsigned flags, int priority) {
  return with_context([&] { return cuStreamCreateWithPriority(stream, flags, priority); });
}

SIMGPU_RUNTIME Error cudaStreamCreateWithFlags(StreamHandle* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}

SIMGPU_RUNTIME Error cudaStreamCreate(StreamHandle* stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }

SIMGPU_RUNTIME Error cudaEventCreateWithFlags(CUevent* event, unsigned flags) {
  return with_context([&] { return cuEventCreate(event, flags); });
}

SIMGPU_RUNTIME Error cudaEventCreate(CUevent* event) { return cudaEventCreateWithFlags(event, 0); }

// A function that is the driver's of another name.
#define SIMGPU_FORWARD(name, driver, parameters, arguments) \
  SIMGPU_RUNTIME Error name parameters {                    \
    return with_context([&] { return driver arguments; });  \
  }

SIMGPU_FORWARD(cudaStreamDestroy, cuStreamDestroy, (StreamHandle stream), (stream))
SIMGPU_FORWARD(cudaStreamSynchronize, cuStreamSynchronize, (StreamHandle stream), (stream))
SIMGPU_FORWARD(cudaStreamQuery, cuStreamQuery, (StreamHandle stream), (stream))
SIMGPU_FORWARD(cudaStreamGetPriority, cuStreamGetPriority, (StreamHandle stream, int* priority), (stream, priority))
SIMGPU_FORWARD(cudaStreamWaitEvent, cuStreamWaitEvent, (StreamHandle stream, CUevent event, unsigned flags),
               (stream, event, flags))
SIMGPU_FORWARD(cudaEventDestroy, cuEventDestroy, (CUevent event), (event))
SIMGPU_FORWARD(cudaEventQuery, cuEventQuery, (CUevent event), (event))
SIMGPU_FORWARD(cudaEventSynchronize, cuEventSynchronize, (CUevent event), (event))
SIMGPU_FORWARD(cudaEventRecord, cuEventRecord, (CUevent event, StreamHandle stream), (event, stream))
SIMGPU_FORWARD(cudaEventRecordWithFlags, cuEventRecordWithFlags, (CUevent event, StreamHandle stream, unsigned flags),
               (event, stream, flags))
SIMGPU_FORWARD(cudaEventElapsedTime, cuEventElapsedTime, (float* ms, CUevent from, CUevent to), (ms, from, to))
SIMGPU_FORWARD(cudaLaunchHostFunc, cuLaunchHostFunc, (StreamHandle stream, SimHostFunction function, void* context),
               (stream, function, context))

SIMGPU_FORWARD(cudaThreadExchangeStreamCaptureMode, cuThreadExchangeStreamCaptureMode, (int* mode), (mode))
SIMGPU_FORWARD(cudaStreamBeginCapture, cuStreamBeginCapture_v2, (StreamHandle stream, int mode), (stream, mode))
SIMGPU_FORWARD(cudaStreamEndCapture, cuStreamEndCapture, (StreamHandle stream, SimGraph* graph), (stream, graph))
SIMGPU_FORWARD(cudaStreamIsCapturing, cuStreamIsCapturing, (StreamHandle stream, int* status), (stream, status))
SIMGPU_FORWARD(cudaStreamGetCaptureInfo, cuStreamGetCaptureInfo_v3,
               (StreamHandle stream, int* status, std::uint64_t* id, SimGraph* graph, const SimNode** nodes,
                const void** edges, std::size_t* count),
               (stream, status, id, graph, nodes, edges, count))
SIMGPU_FORWARD(cudaGraphInstantiate, cuGraphInstantiateWithFlags,
               (SimExec * made, SimGraph graph, unsigned long long flags), (made, graph, flags))
SIMGPU_FORWARD(cudaGraphInstantiateWithFlags, cuGraphInstantiateWithFlags,
               (SimExec * made, SimGraph graph, unsigned long long flags), (made, graph, flags))
SIMGPU_FORWARD(cudaGraphLaunch, cuGraphLaunch, (SimExec executable, StreamHandle stream), (executable, stream))
SIMGPU_FORWARD(cudaGraphExecDestroy, cuGraphExecDestroy, (SimExec executable), (executable))
SIMGPU_FORWARD(cudaGraphDestroy, cuGraphDestroy, (SimGraph graph), (graph))
SIMGPU_FORWARD(cudaGraphGetNodes, cuGraphGetNodes, (SimGraph graph, SimNode* nodes, std::size_t* count),
               (graph, nodes, count))
SIMGPU_RUNTIME Error cudaGraphDebugDotPrint(SimGraph, const char* path, unsigned) {
  std::FILE* const file = std::fopen(path, "we");
  if (file == nullptr) return remember(1);
  std::fputs("digraph dot {\n}\n", file);
  return std::fclose(file) == 0 ? 0 : remember(1);
}
