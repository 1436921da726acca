#include "reclaim/shortage.h"

#include <chrono>
#include <utility>

namespace ballonet {

std::function<void(const std::function<void()>&)> Shortage::apart = [](const std::function<void()>& wait) { wait(); };

void Shortage::listen(std::size_t most, std::int64_t patience_ns) {
  std::lock_guard<std::mutex> lock(mutex_);
  most_ = most;
  patience_ns_ = patience_ns;
  forks_ = forks();
  if (most > 0) return;
  done_ = posted_;
  raised_ = false;
  answered_.notify_all();
}

std::size_t Shortage::most() {
  std::lock_guard<std::mutex> lock(mutex_);
  return forks_ == forks() ? most_ : 0;
}

bool Shortage::ask(std::size_t missing, bool last, bool wait) {
  std::uint64_t mine;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (most_ == 0 || forks_ != forks() || listener_ == std::this_thread::get_id()) return false;
    missing_ += missing;
    last_ |= last;
    mine = ++posted_;
    asked_.notify_one();
  }
  if (!wait) return false;
  bool raised = false;
  apart([&] {
    std::unique_lock<std::mutex> lock(mutex_);
    const bool answered =
        answered_.wait_for(lock, std::chrono::nanoseconds(patience_ns_), [&] { return done_ >= mine; });
    raised = answered && raised_;
  });
  return raised;
}

std::pair<std::size_t, bool> Shortage::heard(std::int64_t timeout_ns) {
  std::unique_lock<std::mutex> lock(mutex_);
  listener_ = std::this_thread::get_id();
  asked_.wait_for(lock, std::chrono::nanoseconds(timeout_ns), [&] { return posted_ > taken_; });
  taken_ = posted_;
  return {std::exchange(missing_, 0), std::exchange(last_, false)};
}

void Shortage::answer(bool raised) {
  std::lock_guard<std::mutex> lock(mutex_);
  done_ = taken_;
  raised_ = raised;
  answered_.notify_all();
}

}  // namespace ballonet
