#include "pages/group.h"

#include <memory>
#include <vector>

#include "base/fork.h"

namespace ballonet {
namespace {

struct ForkedMutex {
  std::mutex mutex;
  const HeldOverFork held{ForkRank::kGroup, mutex};
};

struct Lent {
  std::mutex mutex;
  const HeldOverFork held{ForkRank::kLast, mutex};
  std::vector<std::unique_ptr<ForkedMutex>> all;  // never fewer
  std::vector<std::mutex*> idle;                  // with room for all of them, so that giving one back needs no memory
};

Lent& lent() {
  static auto* made = new Lent;
  return *made;
}

std::mutex& borrow() {
  Lent& it = lent();
  {
    std::lock_guard<std::mutex> lock(it.mutex);
    if (!it.idle.empty()) {
      std::mutex* const found = it.idle.back();
      it.idle.pop_back();
      return *found;
    }
  }
  auto made = std::make_unique<ForkedMutex>();  // without the lock: a fork that has begun waits for it
  std::lock_guard<std::mutex> lock(it.mutex);
  it.idle.reserve(it.all.size() + 1);
  it.all.push_back(std::move(made));
  return it.all.back()->mutex;
}

}  // namespace

LentMutex::LentMutex() : get(borrow()) {}

LentMutex::~LentMutex() {
  Lent& it = lent();
  std::lock_guard<std::mutex> lock(it.mutex);
  it.idle.push_back(&get);
}

}  // namespace ballonet
