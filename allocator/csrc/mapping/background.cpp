#include "mapping/background.h"

#include <signal.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <ctime>
#include <set>

#include "base/clock.h"
#include "base/fork.h"
#include "base/tuning.h"

namespace ballonet {
namespace {

constexpr long kSecond = 1'000'000'000;

// Running threads; the lock is held while they are joined.
struct Running {
  std::mutex mutex;
  HeldOverFork held{ForkRank::kThreads, mutex};
  std::set<Background*> all;
};

Running& running_threads() {
  static auto* running = new Running;
  return *running;
}

}  // namespace

Background::Background(std::function<Next()> step) : step_(std::move(step)) { sem_init(&wake_, 0, 0); }

Background::~Background() {
  stop();
  sem_destroy(&wake_);
}

void Background::start() {
  Running& running = running_threads();
  std::lock_guard<std::mutex> lock(running.mutex);
  static const int registered = std::atexit(stop_all);
  (void)registered;  // without it the process ends as it does with any other thread
  forks_ = forks();
  sigset_t all, before;  // signals are for the program's own threads
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  started_ = pthread_create(&thread_, nullptr, enter, this) == 0;
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (started_) running.all.insert(this);
}

void Background::stop() {
  Running& running = running_threads();
  std::lock_guard<std::mutex> lock(running.mutex);
  if (running.all.erase(this) == 1) join();
}

void Background::stop_all() {
  Running& running = running_threads();
  std::lock_guard<std::mutex> lock(running.mutex);
  for (Background* each : running.all) each->join();
  running.all.clear();
}

void Background::join() {
  if (running()) {
    stopping_ = true;
    sem_post(&wake_);
    pthread_join(thread_, nullptr);
  }
  started_ = false;
}

bool Background::running() const { return started_.load(std::memory_order_relaxed) && forks_ == forks(); }

void Background::notify() {
  if (!notified_.exchange(true)) sem_post(&wake_);
}

// False where the time has passed.
bool Background::sleep(bool forever, long nanoseconds) {
  timespec until;
  clock_gettime(CLOCK_REALTIME, &until);  // the only clock that every C library's semaphores know
  until.tv_sec += (until.tv_nsec + nanoseconds) / kSecond;
  until.tv_nsec = (until.tv_nsec + nanoseconds) % kSecond;
  for (;;) {
    if ((forever ? sem_wait(&wake_) : sem_timedwait(&wake_, &until)) == 0) return true;
    if (errno != EINTR) return false;
  }
}

void* Background::enter(void* self) {
  pthread_setname_np(pthread_self(), "ballonet-mapper");
  static_cast<Background*>(self)->run();
  return nullptr;
}

void Background::run() {
  long look = tuning::kFirstLook;
  for (Next next = Next::kNothing;;) {
    const bool told = sleep(next != Next::kLater, look);
    look = told ? tuning::kFirstLook : std::min(2 * look, tuning::kLastLook);
    notified_ = false;
    do {
      if (stopping_) return;
      const std::int64_t began = now_ns();
      next = step_();
      if (next != Next::kMore) break;
      const timespec rest{0, std::clamp<long>(now_ns() - began, tuning::kShortestRest, tuning::kLongestRest)};
      nanosleep(&rest, nullptr);
    } while (true);
  }
}

}  // namespace ballonet
