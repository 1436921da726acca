#include "base/fork.h"

#include <pthread.h>

#include <atomic>
#include <map>
#include <set>
#include <utility>

#include "base/errors.h"

namespace ballonet {

namespace {

std::mutex g_held_mutex;
std::atomic<unsigned> g_forks{0};
thread_local bool t_holding = false;  // handlers that were registered more than once do their work once

// Each lock, and what runs ahead of a fork once all of them are held.
std::map<std::pair<ForkRank, std::mutex*>, std::function<void()>>& held_locks() {
  static auto* all = new std::map<std::pair<ForkRank, std::mutex*>, std::function<void()>>;
  return *all;
}

void lock_all() {
  if (std::exchange(t_holding, true)) return;
  g_held_mutex.lock();
  for (const auto& [key, before] : held_locks()) key.second->lock();
  for (const auto& [key, before] : held_locks()) {
    if (before) before();
  }
}

void unlock_all() {
  if (!std::exchange(t_holding, false)) return;
  for (const auto& [key, before] : held_locks()) key.second->unlock();
  g_held_mutex.unlock();
}

void unlock_in_child() {
  if (!t_holding) return;
  ++g_forks;
  unlock_all();
}

}  // namespace

HeldOverFork::HeldOverFork(ForkRank rank, std::mutex& mutex, std::function<void()> before)
    : rank_(rank), mutex_(mutex) {
  std::lock_guard<std::mutex> lock(g_held_mutex);
  held_locks().emplace(std::make_pair(rank_, &mutex_), std::move(before));
}

HeldOverFork::~HeldOverFork() {
  std::lock_guard<std::mutex> lock(g_held_mutex);
  held_locks().erase({rank_, &mutex_});
}

void watch_forks(const std::string& library) {
  static auto* seen = new std::set<std::string>;
  {
    std::lock_guard<std::mutex> lock(g_held_mutex);
    if (!seen->insert(library).second) return;
  }
  if (pthread_atfork(lock_all, unlock_all, unlock_in_child) != 0)
    throw UsageError("the process has no memory for a fork handler");
}

unsigned forks() { return g_forks.load(std::memory_order_relaxed); }

}  // namespace ballonet
