#include "engine.h"

#include <algorithm>
#include <chrono>
#include <cstdio>

#include "state.h"

namespace simgpu {
namespace {

constexpr CUresult kAssert = 710;
thread_local std::string failure;                  // why what this worker runs has failed; empty while it has not
thread_local std::optional<std::uint64_t> queued;  // the serial number of what this worker runs
constexpr std::size_t kDeepest = 1024;  // operations in a stream before the host has to wait, about as on a GPU

std::int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

bool all_done(const std::vector<OperationPtr>& operations) {
  return std::all_of(operations.begin(), operations.end(), [](const OperationPtr& one) { return one->done; });
}

bool touches(const Work& work, std::uint64_t address, std::uint64_t size) {
  return std::any_of(work.ranges.begin(), work.ranges.end(), [&](const Range& range) {
    return range.address < address + size && address < range.address + range.size;
  });
}

}  // namespace

void fail(const char* why) { failure = why; }

std::optional<std::uint64_t> queued_as() { return queued; }

std::uint64_t Engine::random(Stream& stream) {  // splitmix64
  std::uint64_t value = stream.random += 0x9E3779B97F4A7C15ull;
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9ull;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EBull;
  return value ^ (value >> 31);
}

StreamPtr Engine::create(int device, bool blocking, int priority) {
  constexpr std::uintptr_t kBase = 0x5e0000000000;  // no address of anything: a handle is never followed
  auto stream = std::make_shared<Stream>();
  stream->handle = reinterpret_cast<CUstream>(kBase + next_handle_ * 16);
  stream->device = device;
  stream->blocking = blocking;
  stream->priority = priority;
  stream->random = all_.config.seed * 1'000'003 + next_handle_++;
  all_streams_.erase(std::remove_if(all_streams_.begin(), all_streams_.end(), [](auto& one) { return one.expired(); }),
                     all_streams_.end());
  all_streams_.push_back(stream);
  streams_[stream->handle] = stream;
  return stream;
}

StreamPtr Engine::find(CUstream handle, int device) {
  const auto number = reinterpret_cast<std::uintptr_t>(handle);
  if (number > 2) {
    const auto found = streams_.find(handle);
    return found == streams_.end() ? nullptr : found->second;
  }
  if (device < 0) return nullptr;
  StreamPtr& special = number == 2 ? per_thread_[{std::this_thread::get_id(), device}] : legacy_[device];
  if (special == nullptr) {
    special = create(device, true, 0);
    streams_.erase(special->handle);  // it has no handle of its own
    special->handle = handle;
    special->legacy = number != 2;
  }
  return special;
}

void Engine::destroy(const StreamPtr& stream) {
  streams_.erase(stream->handle);
  stream->closed = true;
  stream->wake.notify_one();
}

bool Engine::idle(const Stream& stream) const {
  if (stream.last != nullptr && !stream.last->done) return false;
  if (!all_done(stream.awaits)) return false;
  return !stream.legacy || std::all_of(all_streams_.begin(), all_streams_.end(), [&](const auto& weak) {
    const StreamPtr other = weak.lock();  // the legacy stream is behind all blocking ones
    return other == nullptr || other->legacy || !other->blocking || other->device != stream.device || idle(*other);
  });
}

void Engine::imply_order(const Stream& stream, Operation& operation) {
  if (!stream.blocking) return;
  for (const auto& weak : all_streams_) {
    const StreamPtr other = weak.lock();
    if (other == nullptr || other.get() == &stream || other->device != stream.device) continue;
    if (!(stream.legacy ? other->blocking : other->legacy)) continue;
    if (other->last != nullptr && !other->last->done) operation.after.push_back(other->last);
    operation.after.insert(operation.after.end(), other->awaits.begin(), other->awaits.end());
  }
}

OperationPtr Engine::submit(Lock& lock, const StreamPtr& stream, std::shared_ptr<Work> work) {
  progress_.wait(lock, [&] { return stream->queue.size() < kDeepest || held_ || all_.dead != cuda::kSuccess; });
  auto operation = std::make_shared<Operation>();
  operation->after.swap(stream->awaits);
  imply_order(*stream, *operation);
  operation->serial = all_.watch.serial();
  stream->last = operation;
  if (work == nullptr && stream->queue.empty() && all_done(operation->after)) {  // nothing before it: it has passed
    operation->after.clear();
    operation->done = true;
    operation->ended_ns = now_ns();
    return operation;
  }
  if (work != nullptr) operation->queued.take();
  operation->work = std::move(work);
  stream->queue.push_back(operation);
  all_.counts.queued_most = std::max<std::uint64_t>(all_.counts.queued_most, ++pending_);
  if (!stream->has_worker) {
    std::thread([this, stream] { serve(stream); }).detach();
    stream->has_worker = true;
    ++workers_;
  }
  stream->wake.notify_one();
  return operation;
}

void Engine::serve(const StreamPtr& stream) {
  Lock lock(all_.mutex);
  while (!stopping_) {
    if (stream->queue.empty()) {
      if (stream->closed) break;
      stream->wake.wait(lock);
      continue;
    }
    const OperationPtr operation = stream->queue.front();
    progress_.wait(lock, [&] { return stopping_ || all_done(operation->after); });
    if (stopping_) break;
    if (operation->work != nullptr) run(lock, *stream, *operation);
    if (stopping_) break;
    stream->queue.pop_front();
    --pending_;
    operation->done = true;
    operation->ended_ns = now_ns();
    std::vector<std::shared_ptr<void>> garbage;
    forget(*operation, garbage);
    progress_.notify_all();
    lock.unlock();
    garbage.clear();  // may call back
    lock.lock();
  }
  --workers_;
  progress_.notify_all();
}

// Others may hold the operation for long: as an event's newest record, as the last of a stream.
void Engine::forget(Operation& operation, std::vector<std::shared_ptr<void>>& garbage) {
  operation.after.clear();
  garbage.push_back(std::move(operation.work));
}

void Engine::run(Lock& lock, Stream& stream, Operation& operation) {
  std::uint64_t delay = all_.config.delay_ns;
  if (delay > 0 && all_.config.seed != 0) delay = random(stream) % (2 * delay);
  if (delay > 0) {
    lock.unlock();
    std::this_thread::sleep_for(std::chrono::nanoseconds(delay));
    lock.lock();
  }
  progress_.wait(lock, [&] { return !held_ || stopping_; });
  if (stopping_ || all_.dead != cuda::kSuccess) return;
  if (++all_.counts.operations == all_.config.die_at) return die(cuda::kIllegalAddress);
  all_.counts.kernels += operation.work->kernel;
  const std::string wrong = all_.watch.violation(all_.memory.mappings, operation.work->ranges, operation.serial);
  if (!wrong.empty()) return report(stream, operation, wrong);
  stream.running = true;
  lock.unlock();
  failure.clear();
  queued = operation.serial;
  const bool done = operation.work->run();
  queued.reset();
  lock.lock();
  stream.running = false;
  if (!failure.empty()) return report(stream, operation, "failed: " + failure + "\n", kAssert);
  if (!done) report(stream, operation, "reads memory that is gone (is the file that is mapped there shorter?)\n");
}

void Engine::report(const Stream& stream, const Operation& operation, const std::string& what, CUresult result) {
  char where[64];
  std::snprintf(where, sizeof where, " on stream %p of device %d ", static_cast<void*>(stream.handle), stream.device);
  write_report(all_, operation.work->name + where + what + "  queued at\n" + operation.queued.text(), true);
  die(result);
}

void Engine::die(CUresult result) {
  all_.dead = result;
  progress_.notify_all();
}

void Engine::before_change(Lock& lock, std::uint64_t address, std::uint64_t size, const char* what) {
  for (const auto& weak : std::vector<std::weak_ptr<Stream>>(all_streams_)) {
    const StreamPtr stream = weak.lock();
    if (stream == nullptr || !stream->running) continue;
    const OperationPtr operation = stream->queue.front();
    if (!touches(*operation->work, address, size)) continue;
    Trace here;
    here.take();
    report(*stream, *operation, std::string("is running where memory is ") + what + ", at\n" + here.text());
    progress_.wait(lock, [&] { return operation->done || stopping_; });
  }
}

void Engine::wait(Lock& lock, const OperationPtr& operation) {
  progress_.wait(lock, [&] { return operation->done || stopping_; });
}

void Engine::wait_for_all(Lock& lock, int device) {
  for (const auto& weak : std::vector<std::weak_ptr<Stream>>(all_streams_)) {
    const StreamPtr stream = weak.lock();
    if (stream == nullptr || (device >= 0 && stream->device != device)) continue;
    const std::vector<OperationPtr> awaits = stream->awaits;
    if (stream->last != nullptr) wait(lock, OperationPtr(stream->last));
    for (const OperationPtr& one : awaits) wait(lock, one);
  }
}

void Engine::hold(bool on) {
  held_ = on;
  progress_.notify_all();
}

void Engine::stop(Lock& lock) {
  stopping_ = true;
  progress_.notify_all();
  for (const auto& weak : all_streams_) {
    if (const StreamPtr stream = weak.lock()) stream->wake.notify_all();
  }
  progress_.wait(lock, [&] { return workers_ == 0; });
}

}  // namespace simgpu
