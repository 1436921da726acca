#include "reclaim.h"

#include <algorithm>
#include <ctime>
#include <exception>
#include <set>
#include <tuple>
#include <utility>

namespace ballonet {
namespace {

std::int64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1'000'000'000LL + now.tv_nsec;
}

// What an entry names is its own: nothing is taken, or filled, twice.
void check_apart(const std::vector<Reclaim::Entry>& entries) {
  std::set<std::int64_t> keys;
  std::vector<std::tuple<std::shared_ptr<Range>, std::size_t, std::size_t>> spans;
  for (const auto& [key, takeable] : entries) {
    if (!keys.insert(key).second) {
      throw UsageError(format("two entries have the key %lld", static_cast<long long>(key)));
    }
    if (!takeable.group) throw UsageError("an entry belongs to a group");
    for (const Takeable::Part& part : takeable.parts) {
      spans.emplace_back(part.home.lock(), part.first, part.count);
      spans.emplace_back(part.twin.lock(), part.twin_first, part.count);
    }
  }
  std::sort(spans.begin(), spans.end());
  for (std::size_t i = 1; i < spans.size(); ++i) {
    const auto& [range, first, count] = spans[i - 1];
    if (range && range == std::get<0>(spans[i]) && std::get<1>(spans[i]) - first < count) {
      throw UsageError("two parts share pieces");
    }
  }
}

}  // namespace

void Reclaim::publish(std::vector<Entry> entries) {
  check_apart(entries);
  std::lock_guard<std::mutex> lock(mutex);
  std::vector<Entry> admitted;
  for (Entry& entry : entries) {
    if (mapper_->admit(entry.takeable)) admitted.push_back(std::move(entry));
  }
  entries_ = std::move(admitted);
}

void Reclaim::withdraw(const std::vector<std::int64_t>& keys) {
  std::lock_guard<std::mutex> lock(mutex);
  const std::set<std::int64_t> gone(keys.begin(), keys.end());
  const auto named = [&](const Entry& entry) { return gone.count(entry.key) > 0; };
  entries_.erase(std::remove_if(entries_.begin(), entries_.end(), named), entries_.end());
}

std::vector<std::int64_t> Reclaim::keys() {
  std::lock_guard<std::mutex> lock(mutex);
  const auto is_void = [&](const Entry& e) { return mapper_->outlook(e.takeable).fate == Taken::Fate::kVoid; };
  entries_.erase(std::remove_if(entries_.begin(), entries_.end(), is_void), entries_.end());
  std::vector<std::int64_t> keys;
  for (const Entry& entry : entries_) keys.push_back(entry.key);
  return keys;
}

std::deque<Reclaim::Event> Reclaim::taken() {
  std::lock_guard<std::mutex> lock(mutex);
  return std::exchange(events_, {});
}

bool Reclaim::meet(const PoolExhausted& reason, std::size_t before) {
  if (reason.missing == 0) return false;
  std::lock_guard<std::mutex> lock(mutex);
  if (pages_ != before) return true;  // for another thread, which may not need them all
  return take(reason.wanted, reason.missing, true) > 0;
}

void Reclaim::shrink() {
  std::lock_guard<std::mutex> lock(mutex);
  if (const std::size_t missing = mapper_->missing(0)) take(0, missing, false);
}

std::size_t Reclaim::demand() {
  if (!demanded()) return 0;
  std::lock_guard<std::mutex> lock(mutex);
  const std::size_t missing = mapper_->missing(wanted_);
  if (missing == 0) demanded_ = false;
  return missing;
}

std::size_t Reclaim::obey() {
  if (!demanded()) return 0;
  std::lock_guard<std::mutex> lock(mutex);
  demanded_ = false;
  const std::size_t missing = mapper_->missing(wanted_);
  return missing > 0 ? take(std::exchange(wanted_, 0), missing, false) : 0;
}

// Pre: the caller holds the lock. Entries in their order until `missing` pages are free; where they cannot be met, none
// or what there is. Returns the pages.
std::size_t Reclaim::take(std::size_t wanted, std::size_t missing, bool all_or_none) {
  std::size_t ready = 0, leased = 0;
  for (auto entry = entries_.begin(); entry != entries_.end() && ready < missing;) {
    const Taken found = mapper_->outlook(entry->takeable);
    if (found.fate == Taken::Fate::kTaken) ready += found.pages;
    if (found.fate == Taken::Fate::kLeased) leased += found.pages;
    entry = found.fate == Taken::Fate::kVoid ? entries_.erase(entry) : std::next(entry);
  }
  if (ready < missing && leased > 0 && (!all_or_none || ready + leased >= missing)) {
    wanted_ = demanded_ ? std::max(wanted_, wanted) : wanted;
    demanded_ = true;
  }
  if (ready < missing && all_or_none) return 0;

  std::size_t freed = 0;
  std::exception_ptr failed;
  for (auto entry = entries_.begin(); entry != entries_.end() && freed < missing;) {
    Taken found{Taken::Fate::kLater, 0};
    for (int attempt = 0; attempt < 2; ++attempt) {  // a driver call that failed once deserves a second try
      try {
        found = mapper_->take(entry->takeable);
        break;
      } catch (const PoolExhausted&) {
        break;  // of the host: the driver has less than the budget allows
      } catch (const DriverError&) {
        failed = std::current_exception();
      }
    }
    if (found.fate == Taken::Fate::kTaken) {
      if (events_.size() == kCapacity) events_.pop_front();
      events_.push_back({now_ns(), entry->key, found.pages});
      freed += found.pages;
    }
    const bool stays = found.fate == Taken::Fate::kLater || found.fate == Taken::Fate::kLeased;
    entry = stays ? std::next(entry) : entries_.erase(entry);
  }
  pages_ += freed;
  if (freed == 0 && failed) std::rethrow_exception(failed);
  return freed;
}

void Reclaim::check() {
  std::lock_guard<std::mutex> lock(mutex);
  for (const Entry& entry : entries_) mapper_->check(entry.takeable);
}

}  // namespace ballonet
