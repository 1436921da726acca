#include "driver/streams.h"

#include <algorithm>

#include "base/tuning.h"

namespace ballonet {
namespace {

bool is_gone(CUresult code) { return code == cuda::kInvalidHandle || code == cuda::kContextIsDestroyed; }

}  // namespace

bool Streams::known(CUstream stream) const {
  if (of_all_threads(stream) == nullptr) return true;  // see Note [Streams of threads]
  return std::any_of(quick_.begin(), quick_.end(),
                     [&](const auto& each) { return each.load(std::memory_order_acquire) == stream; });
}

void Streams::note(CUstream stream) {
  if (known(stream) || std::find(seen_.begin(), seen_.end(), stream) != seen_.end()) return;
  seen_.push_back(stream);
  for (auto& each : quick_) {
    if (each.load(std::memory_order_relaxed) != nullptr) continue;
    return each.store(stream, std::memory_order_release);
  }
}

void Streams::forget(CUstream stream) {
  if (stream == nullptr) return;
  seen_.erase(std::remove(seen_.begin(), seen_.end(), stream), seen_.end());
  for (auto& each : quick_) {
    if (each.load(std::memory_order_relaxed) == stream) each.store(nullptr, std::memory_order_release);
  }
}

bool Streams::capturing(const std::vector<CUstream>& some) const {
  return std::any_of(some.begin(), some.end(), [this](CUstream stream) {
    int status = cuda::kCaptureNone;
    const auto asked = driver_.cuStreamIsCapturing(stream, &status);
    // The legacy stream answers so while a blocking stream is being captured, also one that was never seen.
    if (asked.code() == cuda::kStreamCaptureImplicit) return true;
    return asked.ok() && status != cuda::kCaptureNone;
  });
}

Fence Streams::fence(const std::vector<CUstream>& some) {
  Fence made;
  if (!capturing(some)) record(made, some);
  return made;
}

Fence Streams::fence_over_all() {
  Fence made;
  want_sync(made);
  return made;
}

CUevent Streams::event() {
  CUevent event = nullptr;
  if (!spare_.empty()) {
    event = spare_.back();
    spare_.pop_back();
  } else if (!driver_.cuEventCreate(&event, cuda::kEventDisableTiming).ok()) {
    return nullptr;
  }
  return event;
}

void Streams::want_sync(Fence& fence) { fence.sync = syncs_wanted_ = std::max(syncs_wanted_, syncs_begun_ + 1); }

void Streams::end_sync(std::uint64_t number) { syncs_done_ = std::max(syncs_done_, number); }

// Post: recorded, or a capture has begun meanwhile. Pre: none of these is being captured.
void Streams::record(Fence& fence, std::vector<CUstream> streams) {
  for (CUstream stream : streams) {
    CUevent made = event();
    if (made == nullptr) {
      want_sync(fence);
      continue;
    }
    const auto recorded = driver_.cuEventRecord(made, stream);
    (recorded.ok() ? fence.events : spare_).push_back(made);
    if (!recorded.ok()) want_sync(fence);
    if (!is_gone(recorded.code())) continue;
    lost_ = syncs_wanted_;
    forget(stream);
  }
  fence.sync = std::max(fence.sync, lost_ > syncs_done_ ? lost_ : 0);
  fence.recorded = !capturing(streams);
  if (fence.recorded) return;
  recycle(fence);
}

bool Streams::passed(Fence& fence) {
  if (!fence.recorded) {
    if (captures_ > 0 || capturing()) return false;
    record(fence, seen_);
    if (!fence.recorded) return false;
  }
  if (fence.sync > syncs_done_) return false;
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

Awaited Streams::awaited(Fence& fence) {
  for (int attempt = 0; attempt < tuning::kFences; ++attempt) {
    if (!fence.recorded && !capturing()) record(fence, seen_);
    const bool late = fence.sync > syncs_done_;
    if (!fence.recorded || (late && capturing())) continue;
    Awaited found{{}, late ? fence.sync : 0};
    bool captured = false;
    for (CUevent event : fence.events) {
      const auto asked = driver_.cuEventQuery(event);
      captured |= asked.code() == cuda::kCapturedEvent;
      if (!asked.ok()) found.events.push_back(event);
    }
    if (!captured) return found;
    recycle(fence);
    fence.recorded = false;
  }
  throw UsageError("memory is still in use by a stream whose graph capture has not ended");
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
