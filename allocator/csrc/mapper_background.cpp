// What the thread behind a mapper does, step by step. See Note [The thread behind] in background.h.
#include "mapper.h"

namespace ballonet {
namespace {

constexpr std::size_t kPiecesAtOnce = 8;  // that are unmapped under one lock

}  // namespace

void Mapper::stop_background() {
  background_.stop();
  std::lock_guard<std::mutex> lock(mutex);
  DriverScope scope(driver_, context_.handle);
  keeping_ = false;
  expect_no_more();
  empty_slots(device_.created(), Take::kAll);
  std::lock_guard<std::mutex> requests(requests_mutex_);
  requests_.clear();
}

void Mapper::map_ahead(const std::shared_ptr<Range>& range, std::size_t first, std::size_t count) {
  if (first > range->pieces || count > range->pieces - first) {
    throw UsageError(format("pieces %zu to %zu lie outside a range of %zu", first, first + count, range->pieces));
  }
  if (range->owner != Owner::kKv) throw UsageError("only ranges of KV are mapped ahead");
  if (count == 0 || !background_.running()) return;
  {
    std::lock_guard<std::mutex> lock(requests_mutex_);
    if (requests_.size() == kRequests) return;
    requests_.push_back({range, first, first + count});
  }
  background_.notify();
}

void Mapper::catch_up() {
  Ranges done;
  std::lock_guard<std::mutex> lock(mutex);
  DriverScope scope(driver_, context_.handle);
  while (work_ahead(done) || work_coming(done)) {
  }
}

Background::Next Mapper::work() {
  Ranges done;
  Lock lock(mutex);
  bool requested;
  {
    std::lock_guard<std::mutex> requests(requests_mutex_);
    requested = !requests_.empty();
  }
  if (!requested && !coming_ && retiring_.empty() && !streams_.sync_wanted()) return Background::Next::kNothing;
  DriverScope scope(driver_, context_.handle);
  if (streams_.capturing()) return Background::Next::kLater;
  if (streams_.sync_wanted()) return synchronize_streams(lock);
  if (requested) {
    work_ahead(done);
    return Background::Next::kMore;
  }
  if (work_coming(done)) return Background::Next::kMore;
  if (retiring_.empty()) return Background::Next::kNothing;
  Retirement& oldest = retiring_.front();
  if (!streams_.passed(*oldest.fence)) return Background::Next::kLater;
  std::size_t freed = 0;
  const Left left = finish_retired(oldest, kPiecesAtOnce, freed);
  if (left == Left::kSome) return Background::Next::kMore;
  Retirement finished = std::move(oldest);
  retiring_.pop_front();
  if (left == Left::kRefused) {  // as in reap_locked
    retiring_.push_back(std::move(finished));
    return Background::Next::kLater;
  }
  done.push_back(std::move(finished.range));
  return Background::Next::kMore;
}

// See Note [Streams without events].
Background::Next Mapper::synchronize_streams(Lock& lock) {
  try {
    await(lock, {{}, streams_.syncs_done() + 1});
  } catch (const DriverError&) {
    return Background::Next::kLater;
  }
  return Background::Next::kMore;
}

// One piece of the oldest request. False where there is none. Pre: the caller holds the lock.
bool Mapper::work_ahead(Ranges& done) {
  Ahead* oldest;
  {
    std::lock_guard<std::mutex> lock(requests_mutex_);
    if (requests_.empty()) return false;
    oldest = &requests_.front();  // stays: others only add to the end, and whoever removes holds the mapper's lock
  }
  if (const std::shared_ptr<Range> range = oldest->range.lock()) {
    done.push_back(range);
    const auto backed = [&] { return range->at(oldest->next).backing != Backing::kNone; };
    while (!range->closed_ && oldest->next < oldest->end && backed()) ++oldest->next;
    const bool wanted = !range->closed_ && oldest->next < oldest->end;
    if (wanted && map_one_ahead(*range, oldest->next, Take::kNotAhead)) return true;
  }
  std::lock_guard<std::mutex> lock(requests_mutex_);
  requests_.pop_front();
  return true;
}

// Pre: the piece is unbacked. False where no more can be mapped ahead.
bool Mapper::map_one_ahead(Range& range, std::size_t piece, Take take) {
  if (ahead_ >= ahead_limit() || streams_.capturing()) return false;
  empty_slots(1, take);
  try {
    const PageId hint = page_after(range, piece, Backing::kDevice);
    back(range, {piece}, device_, device_.take(1, range.owner, hint), Backing::kDevice);
  } catch (const std::runtime_error&) {
    return false;
  }
  keep(range, piece, true);
  return true;
}

}  // namespace ballonet
