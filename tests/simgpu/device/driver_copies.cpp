// Copies and fills.
//
// Note [What the host waits for]. As CUDA documents it: a copy from pageable memory returns once its bytes are staged;
// one to pageable memory, and one between host memory of either kind where one side is pageable, returns when it is
// done; one between pinned memory and a device, or between devices, is asynchronous. The forms without a stream use the
// legacy stream, and wait for it unless both sides are on devices.
#include <cstring>

#include "state.h"

using namespace simgpu;

namespace {

using ull = unsigned long long;

enum class Place { kDevice, kPinned, kPageable };

CUresult find_place(State& all, std::uint64_t address, std::uint64_t size, const char* function, Place* place) {
  std::vector<Run> runs;
  const CUresult refused = all.memory.mappings.locate(address, size, cuda::kInvalidValue, function, &runs);
  if (refused != cuda::kSuccess) return refused;
  if (runs.front().store == Store::kPlain) {
    *place = all.watch.is_pinned(address, size) ? Place::kPinned : Place::kPageable;
  } else {
    *place = runs.front().store == Store::kHost ? Place::kPinned : Place::kDevice;
  }
  return cuda::kSuccess;
}

// `guarded`: of host memory, where a page of a file that is mapped there may be gone.
std::shared_ptr<Work> copy_of(const char* name, std::uint64_t to, std::uint64_t from, std::uint64_t size,
                              bool guarded) {
  auto work = std::make_shared<Work>();
  work->name = name;
  auto* const target = reinterpret_cast<char*>(to);
  const auto* const source = reinterpret_cast<const char*>(from);
  work->run = [=] {
    return guarded ? ballonet::standin::read_guarded(target, source, size)
                   : std::memcpy(target, source, size) != nullptr;
  };
  return work;
}

// Copies from a buffer of its own.
std::shared_ptr<Work> staged_copy(const char* name, std::uint64_t to, std::uint64_t from, std::uint64_t size) {
  const auto* const first = reinterpret_cast<const char*>(from);
  auto staging = std::make_shared<std::vector<char>>(first, first + size);
  auto work = std::make_shared<Work>();
  work->name = name;
  work->run = [to, staging] {
    return std::memcpy(reinterpret_cast<char*>(to), staging->data(), staging->size()), true;
  };
  return work;
}

// `synchronous`: the form without a stream.
CUresult copy(State& all, Lock& lock, const char* function, std::uint64_t to, std::uint64_t from, std::uint64_t size,
              const StreamPtr& stream, bool synchronous) {
  if (size == 0) return cuda::kSuccess;
  Place target, source;
  CUresult refused = find_place(all, to, size, function, &target);
  if (refused == cuda::kSuccess) refused = find_place(all, from, size, function, &source);
  if (refused != cuda::kSuccess) return refused;
  const bool pageable = target == Place::kPageable || source == Place::kPageable;
  if (stream->capture && (pageable || synchronous))
    return break_capture(stream->capture, cuda::kStreamCaptureUnsupported, function, "pageable memory in a capture");
  const bool stages = source == Place::kPageable && target == Place::kDevice;
  if (stages && synchronous) all.engine.wait(lock, all.engine.mark(lock, stream));
  const auto work =
      stages ? staged_copy(function, to, from, size) : copy_of(function, to, from, size, source == Place::kPinned);
  if (source != Place::kPageable) work->ranges.push_back(Range{from, size, false});
  if (target != Place::kPageable) work->ranges.push_back(Range{to, size, true});
  refused = submit(all, lock, stream, work);
  if (refused != cuda::kSuccess || stream->capture) return refused;
  const bool both_on_devices = target == Place::kDevice && source == Place::kDevice;
  if (stages || (synchronous ? both_on_devices : !pageable)) return refused;
  ++all.counts.synchronizations;
  all.engine.wait(lock, OperationPtr(stream->last));
  return all.dead;
}

CUresult fill(const char* function, std::uint64_t to, std::uint64_t size, CUstream handle, unsigned char value) {
  return enter(Needs::kContext, function, [&](State& all, auto& lock) {
    return with_stream(all, handle, function, [&](const StreamPtr& stream) {
      if (size == 0) return CUresult{cuda::kSuccess};
      Place place;
      const CUresult refused = find_place(all, to, size, function, &place);
      if (refused != cuda::kSuccess) return refused;
      if (place == Place::kPageable) return refuse(cuda::kInvalidValue, "%s: %#llx is pageable", function, ull{to});
      std::vector<Run> runs;
      CUresult fillable = all.memory.mappings.locate(to, size, cuda::kInvalidValue, function, &runs);
      if (fillable == cuda::kSuccess) fillable = all.memory.mappings.fillable(to, size, runs, function);
      if (fillable != cuda::kSuccess) return fillable;
      const auto work = std::make_shared<Work>();
      work->name = function;
      work->ranges.push_back(Range{to, size, true});
      work->run = [=] { return std::memset(reinterpret_cast<char*>(to), value, size), true; };
      return submit(all, lock, stream, work);
    });
  });
}

CUresult copy_on(const char* function, std::uint64_t to, std::uint64_t from, std::uint64_t size, CUstream handle,
                 bool synchronous) {
  return enter(synchronous ? Needs::kSafe : Needs::kContext, function, [&](State& all, auto& lock) {
    return with_stream(all, handle, function, [&](const StreamPtr& stream) {
      return copy(all, lock, function, to, from, size, stream, synchronous);
    });
  });
}

}  // namespace

CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, std::size_t size, CUstream handle) {
  return copy_on("cuMemcpyAsync", to, from, size, handle, false);
}

CUresult cuMemcpy(CUdeviceptr to, CUdeviceptr from, std::size_t size) {
  return copy_on("cuMemcpy", to, from, size, nullptr, true);
}

CUresult cuMemcpyHtoD(CUdeviceptr to, const void* from, std::size_t size) {
  return copy_on("cuMemcpyHtoD", to, reinterpret_cast<std::uintptr_t>(from), size, nullptr, true);
}

CUresult cuMemcpyDtoH(void* to, CUdeviceptr from, std::size_t size) {
  return copy_on("cuMemcpyDtoH", reinterpret_cast<std::uintptr_t>(to), from, size, nullptr, true);
}

CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, std::size_t size, CUstream stream) {
  return fill("cuMemsetD8Async", to, size, stream, value);
}

CUresult cuMemsetD8_v2(CUdeviceptr to, unsigned char value, std::size_t size) {
  return fill("cuMemsetD8", to, size, nullptr, value);
}

void* simgpu_pointer(std::uint64_t address, std::size_t size) {
  State& all = state();
  Lock lock(all.mutex);
  const std::uint64_t since = queued_as().value_or(all.watch.serial());
  return all.watch.violation(all.memory.mappings, {Range{address, size, false}}, since).empty()
             ? reinterpret_cast<void*>(address)
             : nullptr;
}
