// A thread for what can be done later: it is told that there is something, and does it step by step.
//
// Note [The thread behind]
// Page tables change slowly, so what need not happen at once happens here, without the interpreter's lock: retired
// pages are unmapped, and pages are mapped ahead of their use. A step holds the mapper's lock for a few driver calls,
// and the thread rests afterwards for as long as it took: whoever needs the lock gets it in between. It never waits for
// the device, but looks again a little later, and does nothing while a stream is being captured. Whatever it does any
// other thread may do instead, so without it (the system has no thread to give, the child of a fork) nothing is lost
// but time.
//
// Guarantees: one step runs at a time, and none once `stop` has returned.
//
// Lock: none is wanted. A step takes the mapper's itself, so that whoever stops the thread does not hold that.
#pragma once

#include <pthread.h>
#include <semaphore.h>

#include <atomic>
#include <functional>
#include <mutex>

namespace ballonet {

class Background {
 public:
  // What is left to do: something at once, something that time must pass for, nothing.
  enum class Next { kMore, kLater, kNothing };

  // `step` throws nothing.
  explicit Background(std::function<Next()> step);
  ~Background();
  Background(const Background&) = delete;
  Background& operator=(const Background&) = delete;

  // Once. Where the system has no thread to give, nothing is.
  void start();
  // Waits for the step that is being done. The process does so at its end, if nobody did before.
  void stop();
  bool running() const;
  // There is something to do.
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
