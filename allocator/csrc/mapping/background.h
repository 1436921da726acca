// The background thread: it is notified of work, and does it step by step.
//
// Note [The background thread]
// Page tables change slowly, so work that can wait happens here, without the interpreter's lock: retired pages are
// unmapped, and pages are mapped ahead of their use. A step holds the mapper's lock for a few driver calls, and the
// thread then sleeps for as long as it took, so that others get the lock. It never waits for the device, but looks
// again a little later, and does nothing while a stream is being captured. Any other thread may do the same work, so
// without it (no thread could be started, the child of a fork) nothing is lost but time.
//
// Guarantees: one step runs at a time, and none once `stop` has returned.
//
// Lock: none needed. A step takes the mapper's itself, so callers of `stop` do not hold that.
#pragma once

#include <pthread.h>
#include <semaphore.h>

#include <atomic>
#include <functional>
#include <mutex>

namespace ballonet {

class Background {
 public:
  // The next step: at once, later, or none.
  enum class Next { kMore, kLater, kNothing };

  // `step` throws nothing.
  explicit Background(std::function<Next()> step);
  ~Background();
  Background(const Background&) = delete;
  Background& operator=(const Background&) = delete;

  // Starts the thread, once. Does nothing where the system has none to give.
  void start();
  // Ends the thread after its present step. The process does so at its end, if it was not done before.
  void stop();
  bool running() const;
  // Wakes the thread, as there is work.
  void notify();

 private:
  void run();
  void join();
  bool sleep(bool forever, long nanoseconds);
  static void* enter(void* self);
  static void stop_all();

  const std::function<Next()> step_;
  sem_t wake_;
  std::atomic<bool> notified_{false}, stopping_{false}, started_{false};
  unsigned forks_ = 0;  // when it was started
  pthread_t thread_{};
};

}  // namespace ballonet
