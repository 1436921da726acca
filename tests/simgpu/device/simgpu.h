// What the simulated device offers beyond CUDA's own interface: kernels that are functions of the host, and counters.
//
// The functions are exported by build/simgpu/lib/libcuda.so.1. A stream is a CUstream, which is a cudaStream_t; 0 is
// the legacy default stream, 1 and 2 are CUDA's special handles for the legacy and the per-thread default stream.
//
// Words
//   operation  what is queued to a stream: a kernel, a copy, a fill, a host function, a wait, an event's record
//   range      device or registered host memory that an operation reads or writes; checked when the operation runs
//              against the mappings as they were when it was queued
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

struct SimRange {
  uint64_t address, size;  // bytes; a range of size 0 is ignored
  int write;               // 0 = is read, 1 = is written (perhaps read too)
};

// Queues a kernel. `run(context)` is called by the stream's worker thread, which holds no lock of the device and no
// GIL; it must not call CUDA. In a capture nothing runs now: each replay of the graph calls `run` once, with the ranges
// checked anew. `drop(context)` is called exactly once, when nothing can call `run` any more: after the only run, or
// when the graph and all its executables are destroyed, or when the operation is refused (then before the call
// returns). `drop` may be NULL. `name` and `ranges` are copied. Returns a cudaError_t, also seen by cudaGetLastError:
// 700 after a violation, 900 where the capture forbids it, 400 for an unknown stream.
int simgpu_launch(void* stream, const char* name, void (*run)(void*), void (*drop)(void*), void* context,
                  const struct SimRange* ranges, size_t range_count);

// Called by `run`: the kernel has failed, as by an assertion on the device. It is reported, and every later call
// answers 710.
void simgpu_fail(const char* why);

// Waits until everything queued to `stream` has run, for what an emulated operator must read on the host (`.item()`,
// shapes that depend on data). Counted as a synchronization under the reason `why`. Returns a cudaError_t; 900 while
// the stream captures.
int simgpu_synchronize_for(void* stream, const char* why);

// The host address at which the CPU may use `address`; NULL where it is not accessible device or host memory now, or,
// for what an operation runs, has changed since that was queued. Equal to the address itself (device memory lies in
// this process).
void* simgpu_pointer(uint64_t address, size_t size);

struct SimCounts {
  uint64_t operations;        // that ran, replays included
  uint64_t kernels;           // of these, launched by simgpu_launch
  uint64_t maps, unmaps;      // by cuMemMap and cuMemUnmap
  uint64_t unmaps_busy;       // of these, while some stream had work queued or running
  uint64_t synchronizations;  // the host waited: stream, event, device, pageable copies, simgpu_synchronize_for
  uint64_t launches;          // of graphs
  uint64_t reports;           // violations found
  uint64_t queued_most;       // operations of all streams together, at the most
};
void simgpu_counts(struct SimCounts* counts);

// The newest report of a violation, at most `capacity` bytes with the final 0; empty where there was none.
void simgpu_report(char* text, size_t capacity);

// Operations of all graphs that can be launched which read or write some of these bytes, and in `operations`, unless it
// is NULL, all of their operations.
size_t simgpu_graphs_using(uint64_t address, uint64_t size, size_t* operations);

// Writes a line to stderr and to the file of reports, without a violation.
void simgpu_note(const char* text);

// Sets the delay before each operation, ns, from now on (SIMGPU_DELAY gives the first). A test uses it to have the host
// run ahead for a while. Jitter by SIMGPU_SEED stays as it is.
void simgpu_set_delay(uint64_t ns);

// Holds every stream before its next operation (1), or lets them go on (0). What waits on the host meanwhile waits.
void simgpu_hold(int hold);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
