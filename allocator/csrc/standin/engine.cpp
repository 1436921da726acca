#include "engine.h"

#include <signal.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "registered.h"

namespace ballonet::standin {
namespace {

constexpr std::uint64_t kPiece = 1 << 20;  // bytes moved at a time
constexpr int kPoison = 0xFF;

using std::chrono::nanoseconds;
using std::chrono::steady_clock;

std::uint64_t next_piece(const Op& op) { return std::min(kPiece, op.size - op.done); }

// When so many of its bytes have crossed.
steady_clock::time_point due_at(const Op& op, std::uint64_t bytes) {
  return op.begun + nanoseconds(static_cast<std::int64_t>(static_cast<double>(bytes) * op.ns_per_byte));
}

steady_clock::time_point next_due(const Op& op) { return due_at(op, op.done + next_piece(op)); }

}  // namespace

void Engine::configure(std::uint64_t bandwidth, std::uint64_t latency_ns, std::uint64_t peer_bandwidth) {
  bandwidth_ = bandwidth;
  latency_ns_ = latency_ns;
  peer_bandwidth_ = peer_bandwidth;
  work_.notify_all();  // what was held may go on
}

bool Engine::touched_by_pending(const std::vector<Run>& runs) const {
  for (const auto& stream : busy_) {
    for (const auto& op : stream->queue) {
      if (overlap(op->reads, runs) || overlap(op->writes, runs)) return true;
    }
  }
  return false;
}

std::optional<Failure> Engine::submit(Lock& lock, const std::shared_ptr<Stream>& stream, std::unique_ptr<Op> op) {
  if (stream->index == 0) {
    enqueue(stream, std::move(op));
    const auto done = mark(stream, {});
    wait(lock, done);
    return done->failure;
  }
  if (touched_by_pending(op->writes)) {
    op->state = Op::kPoisonFirst;
    enqueue(stream, std::move(op));
    return std::nullopt;
  }
  Op& held = *op;  // stays in the queue while it is held
  held.state = Op::kHeld;
  enqueue(stream, std::move(op));
  lock.unlock();
  std::memset(held.destination, kPoison, held.size);
  lock.lock();
  held.state = Op::kReady;
  work_.notify_all();
  return std::nullopt;
}

std::shared_ptr<Marker> Engine::mark(const std::shared_ptr<Stream>& stream, Clock clock) {
  auto marker = std::make_shared<Marker>();
  marker->clock = std::move(clock);
  marker->reached = stream->queue.empty();
  if (marker->reached) {
    marker->failure = std::exchange(stream->failure, std::nullopt);
  } else {
    auto op = std::make_unique<Op>();
    op->kind = Op::kMark;
    op->marker = marker;
    enqueue(stream, std::move(op));
  }
  return marker;
}

void Engine::wait_for(const std::shared_ptr<Stream>& stream, const std::shared_ptr<Marker>& marker) {
  if (marker->reached) {
    if (marker->failure) stream->failure = marker->failure;
    return;
  }
  auto op = std::make_unique<Op>();
  op->kind = Op::kWait;
  op->marker = marker;
  enqueue(stream, std::move(op));
}

void Engine::wait(Lock& lock, const std::shared_ptr<Marker>& marker) {
  reached_.wait(lock, [&] { return marker->reached; });
}

std::optional<Failure> Engine::drain(Lock& lock) {
  std::vector<std::shared_ptr<Marker>> markers;
  for (const auto& stream : std::vector<std::shared_ptr<Stream>>(busy_)) markers.push_back(mark(stream, {}));
  std::optional<Failure> first;
  for (const auto& marker : markers) {
    wait(lock, marker);
    if (!first) first = marker->failure;
  }
  return first;
}

void Engine::enqueue(const std::shared_ptr<Stream>& stream, std::unique_ptr<Op> op) {
  if (!thread_.joinable()) {
    sigset_t all, before;  // signals are for the program's own threads
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &before);
    stopping_ = false;
    try {
      thread_ = std::thread([this] { run(); });
    } catch (...) {
      ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
      throw;
    }
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }
  if (stream->queue.empty()) busy_.push_back(stream);
  op->submitted = steady_clock::now();
  stream->queue.push_back(std::move(op));
  work_.notify_all();
}

void Engine::stop() {
  {
    Lock lock(mutex_);
    stopping_ = true;
    work_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

void Engine::run() {
  Lock lock(mutex_);
  while (!stopping_) {
    Time sleep_until = Time::max();
    if (advance(lock, &sleep_until)) continue;
    if (sleep_until == Time::max()) {
      work_.wait(lock);
    } else {
      work_.wait_until(lock, sleep_until);
    }
  }
}

// One step. False where nothing can be done before `sleep_until`, or before something is queued.
bool Engine::advance(Lock& lock, Time* sleep_until) {
  bool progress = false;
  for (const auto& stream : busy_) progress |= pass(*stream);
  busy_.erase(std::remove_if(busy_.begin(), busy_.end(), [](const auto& stream) { return stream->queue.empty(); }),
              busy_.end());
  if (progress) {
    reached_.notify_all();
    return true;  // a marker may have freed another stream
  }
  const Time now = steady_clock::now();
  std::shared_ptr<Stream> chosen;
  for (const auto& stream : busy_) {
    Op& op = *stream->queue.front();
    if (op.kind == Op::kWait || op.state == Op::kHeld) continue;
    if (op.state != Op::kRunning) {
      if (op.state == Op::kPoisonFirst) {
        move(lock, op);
        return true;
      }
      if (latency_ns_ == kEndless && (op.link == Link::kToDevice || op.link == Link::kToHost)) continue;
      begin(*stream, op);
    }
    if (next_due(op) < *sleep_until) {
      *sleep_until = next_due(op);
      chosen = stream;
    }
  }
  if (chosen == nullptr || *sleep_until > now) return false;
  Op& op = *chosen->queue.front();
  move(lock, op);
  if (op.state == Op::kFailed) chosen->failure = Failure{reinterpret_cast<std::uint64_t>(op.source), op.size};
  if (op.state == Op::kFailed || op.done == op.size) {
    chosen->ready_at = op.ns_per_byte > 0 ? due_at(op, op.size) : steady_clock::now();
    chosen->queue.pop_front();
  }
  return true;
}

// Takes what needs no time from the head of a stream's queue: markers, and waits for markers that were reached.
bool Engine::pass(Stream& stream) {
  bool progress = false;
  for (; !stream.queue.empty(); stream.queue.pop_front(), progress = true) {
    const Op& op = *stream.queue.front();
    if (op.kind == Op::kMark) {
      op.marker->reached = true;
      op.marker->failure = std::exchange(stream.failure, std::nullopt);
    } else if (op.kind == Op::kWait && op.marker->reached) {
      if (op.marker->failure) stream.failure = op.marker->failure;
      stream.ready_at = steady_clock::now();
    } else {
      break;
    }
  }
  return progress;
}

void Engine::begin(const Stream& stream, Op& op) {
  op.state = Op::kRunning;
  op.begun = std::max(op.submitted, stream.ready_at);
  if (op.link == Link::kNone) return;
  const bool host = op.link == Link::kToDevice || op.link == Link::kToHost;
  const std::uint64_t bandwidth = host ? bandwidth_ : peer_bandwidth_;
  Time& free_at = link_free_at_[static_cast<int>(op.link) - 1];
  op.begun = std::max(op.begun, free_at) + nanoseconds(host ? latency_ns_ : 0);
  op.ns_per_byte = bandwidth == 0 ? 0 : 1e9 / static_cast<double>(bandwidth);
  free_at = due_at(op, op.size);
}

// The next piece of an operation, or its poison, without the lock: the order checker keeps what is mapped there in
// place.
void Engine::move(Lock& lock, Op& op) {
  const std::uint64_t piece = next_piece(op);
  bool whole = true;
  lock.unlock();
  if (op.state == Op::kPoisonFirst) {
    std::memset(op.destination, kPoison, op.size);
  } else if (op.registered) {
    whole = read_guarded(op.destination + op.done, op.source + op.done, piece);
    if (!whole) std::memset(op.destination, kPoison, op.size);
  } else if (op.kind == Op::kCopy) {
    std::memcpy(op.destination + op.done, op.source + op.done, piece);
  } else {
    std::memset(op.destination + op.done, op.value, piece);
  }
  lock.lock();
  if (op.state == Op::kPoisonFirst) {
    op.state = Op::kReady;
  } else if (whole) {
    op.done += piece;
  } else {
    op.state = Op::kFailed;
  }
}

}  // namespace ballonet::standin
