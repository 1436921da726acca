#include "streams.h"

#include <algorithm>

namespace ballonet {

void Streams::note(CUstream stream) {
  if (std::find(seen_.begin(), seen_.end(), stream) == seen_.end()) seen_.push_back(stream);
}

void Streams::forget(CUstream stream) { seen_.erase(std::remove(seen_.begin(), seen_.end(), stream), seen_.end()); }

bool Streams::capturing(const std::vector<CUstream>& some) const {
  return std::any_of(some.begin(), some.end(), [this](CUstream stream) {
    int status = cuda::kCaptureNone;
    const auto asked = driver_.cuStreamIsCapturing(stream, &status);
    // The legacy stream answers so while a blocking stream is being captured, also one that was never seen.
    if (asked.code() == cuda::kStreamCaptureImplicit) return true;
    return asked.ok() && status != cuda::kCaptureNone;
  });
}

Fence Streams::fence() { return fence(seen_); }

Fence Streams::fence(const std::vector<CUstream>& some) {
  Fence made;
  if (!capturing(some)) record(made, some);
  return made;
}

// All events or none; false where the driver refuses one. Pre: none of these is being captured.
bool Streams::record(Fence& fence, const std::vector<CUstream>& streams) {
  for (CUstream stream : streams) {
    CUevent event = nullptr;
    if (!spare_.empty()) {
      event = spare_.back();
      spare_.pop_back();
    } else if (!driver_.cuEventCreate(&event, cuda::kEventDisableTiming).ok()) {
      recycle(fence);
      return false;
    }
    fence.events.push_back(event);
    if (!driver_.cuEventRecord(event, stream).ok()) {
      recycle(fence);
      return false;
    }
  }
  fence.recorded = true;
  return true;
}

bool Streams::passed(Fence& fence) {
  if (!fence.recorded) {
    if (capturing()) return false;
    if (!record(fence, seen_)) fence.recorded = driver_.cuCtxSynchronize().ok();
    if (!fence.recorded) return false;
  }
  while (!fence.events.empty()) {
    const auto asked = driver_.cuEventQuery(fence.events.back());
    if (asked.code() == cuda::kCapturedEvent) {
      recycle(fence);
      fence.recorded = false;
    }
    if (!asked.ok()) return false;
    spare_.push_back(fence.events.back());
    fence.events.pop_back();
  }
  return true;
}

bool Streams::glance(Fence& fence) {
  constexpr int kLooks = 64;
  for (int look = 0; look < kLooks; ++look) {
    if (passed(fence)) return true;
  }
  return false;
}

void Streams::wait(Fence& fence) {
  if (glance(fence)) return;
  if (capturing()) throw UsageError("memory is still in use by a stream whose graph capture has not ended");
  if (!fence.recorded) driver_.cuCtxSynchronize().or_throw("waiting for every stream before pages change hands");
  fence.recorded = true;
  wait(fence.events);
  recycle(fence);
}

void Streams::wait(const std::vector<CUevent>& events) const {
  for (CUevent event : events) driver_.cuEventSynchronize(event).or_throw("waiting for what a stream was given");
}

void Streams::recycle(Fence& fence) {
  spare_.insert(spare_.end(), fence.events.begin(), fence.events.end());
  fence.events.clear();
}

void Streams::close() {
  for (CUevent event : spare_) driver_.cuEventDestroy(event);
  spare_.clear();
}

}  // namespace ballonet
