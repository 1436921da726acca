// torch's memory history: entries of events, the stacks of live blocks, and trackers.
//
// Note [Order]
// An entry is added by the thread that did the thing: before a block is given back, after one was handed out. So the
// entry of a free comes before that of the next allocation at its address, with no lock of the heap held. What the heap
// does by itself, mapping and unmapping pages and freeing what waited for a stream, it tells under its lock. The lock
// here is a leaf: under it neither the heap nor Python is called.
//
// Guarantees: the newest entries are kept, as many as were asked for.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/ApproximateClock.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace ballonet_torch {

using c10::CachingDeviceAllocator::AllocatorTraceTracker;
using c10::CachingDeviceAllocator::AnnotationEntry;
using c10::CachingDeviceAllocator::CreateContextFn;
using c10::CachingDeviceAllocator::RecordContext;
using c10::CachingDeviceAllocator::TraceEntry;
using Context = std::shared_ptr<c10::GatheredContext>;

// The newest `capacity` of what was added.
template <class T>
class Newest {
 public:
  void add(T item) {
    if (capacity_ == 0) return;
    if (items_.size() == capacity_) items_.pop_front();
    items_.push_back(std::move(item));
  }
  void limit(std::size_t capacity) {
    capacity_ = capacity;
    while (items_.size() > capacity_) items_.pop_front();
  }
  void clear() { items_.clear(); }
  std::vector<T> copy() const { return {items_.begin(), items_.end()}; }

 private:
  std::deque<T> items_;
  std::size_t capacity_ = 0;
};

class History {
 public:
  void record(bool enabled, CreateContextFn recorder, std::size_t capacity, RecordContext when, bool clear,
              const std::vector<std::string>& skipped) {
    TORCH_CHECK(when == RecordContext::NEVER || recorder != nullptr, "memory history with stacks needs a recorder");
    const std::lock_guard<std::mutex> lock(mutex_);
    enabled_ = enabled;
    recorder_ = enabled ? recorder : nullptr;
    when_ = enabled ? when : RecordContext::NEVER;
    skipped_.clear();
    for (const std::string& name : skipped) skipped_.insert(c10::CachingDeviceAllocator::parseTraceEntryAction(name));
    entries_.limit(capacity);
    annotations_.limit(capacity);
    annotations_.clear();
    if (!enabled || clear) entries_.clear();
    if (!enabled) contexts_.clear();
  }

  void track(AllocatorTraceTracker tracker) {
    const std::lock_guard<std::mutex> lock(mutex_);
    trackers_.push_back(std::move(tracker));
    tracked_ = true;
  }

  bool enabled() const { return enabled_; }
  // Are entries kept, or trackers called?
  bool listening() const { return enabled_ || tracked_; }

  // The stack of the caller, where stacks of this level are kept. Pre: the caller holds no lock; it may call Python.
  Context gather(RecordContext level) const {
    if (C10_LIKELY(when_.load() < level)) return nullptr;
    const CreateContextFn recorder = recorder_;
    return recorder == nullptr ? nullptr : recorder();
  }

  void add(TraceEntry::Action action, std::uint64_t address, std::size_t size, void* stream, c10::MempoolId_t pool,
           c10::DeviceIndex device, Context context, std::string metadata = metadata_of_thread()) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (when_.load() < RecordContext::ALLOC) context = nullptr;
    const TraceEntry entry(action, device, address, size, stream, pool, c10::getApproximateTime(), std::move(context),
                           compiling().empty() ? std::string() : compiling().back(), std::move(metadata));
    for (const auto& tracker : trackers_) tracker(entry);
    if (enabled_ && skipped_.count(action) == 0) entries_.add(entry);
  }

  void annotate(c10::DeviceIndex device, const std::vector<std::pair<std::string, std::string>>& facts) {
    if (!enabled_) return;
    AnnotationEntry entry(device, c10::getApproximateTime());
    for (const auto& [name, value] : facts) entry.recordUserMetadata(name, value);
    const std::lock_guard<std::mutex> lock(mutex_);
    annotations_.add(std::move(entry));
  }

  // Who allocated the block that lives at `address`.
  void keep(std::uint64_t address, Context context) {
    if (context == nullptr) return;
    const std::lock_guard<std::mutex> lock(mutex_);
    contexts_[address] = std::move(context);
  }
  Context context_of(std::uint64_t address) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = contexts_.find(address);
    return found == contexts_.end() ? nullptr : found->second;
  }
  void forget(std::uint64_t address) {
    const std::lock_guard<std::mutex> lock(mutex_);
    contexts_.erase(address);
  }

  // With times in us since 1970.
  std::vector<TraceEntry> entries() { return timed(entries_); }
  std::vector<AnnotationEntry> annotations() { return timed(annotations_); }

  // What torch.compile is compiling on this thread, and what the user says of what this thread allocates.
  static std::vector<std::string>& compiling() {
    thread_local std::vector<std::string> names;
    return names;
  }
  static std::string& metadata_of_thread() {
    thread_local std::string metadata;
    return metadata;
  }

 private:
  template <class T>
  std::vector<T> timed(const Newest<T>& from) {
    const auto to_ns = clock_.makeConverter();
    std::unique_lock<std::mutex> lock(mutex_);
    std::vector<T> result = from.copy();
    lock.unlock();
    for (T& item : result) item.time_.t_ = to_ns(item.time_.approx_t_) / 1000;
    return result;
  }

  mutable std::mutex mutex_;
  std::atomic<bool> enabled_{false}, tracked_{false};
  std::atomic<CreateContextFn> recorder_{nullptr};
  std::atomic<RecordContext> when_{RecordContext::NEVER};
  std::set<TraceEntry::Action> skipped_;
  std::vector<AllocatorTraceTracker> trackers_;
  Newest<TraceEntry> entries_;
  Newest<AnnotationEntry> annotations_;
  std::unordered_map<std::uint64_t, Context> contexts_;
  c10::ApproximateClockToUnixTimeConverter clock_;
};

}  // namespace ballonet_torch
