#include "reclaim/reclaim.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <set>
#include <tuple>
#include <utility>

#include "base/tuning.h"

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

namespace {

// What an entry names is its own: nothing is taken, or filled, twice. Of divisible entries that is looked for piece by
// piece.
void check_apart(const std::vector<Reclaim::Entry>& entries) {
  std::set<std::int64_t> keys;
  std::vector<std::tuple<std::shared_ptr<Range>, std::size_t, std::size_t>> spans;
  for (const auto& [key, takeable, limit] : entries) {
    if (!keys.insert(key).second) {
      throw UsageError(format("two entries have the key %lld", static_cast<long long>(key)));
    }
    if (!takeable.group) throw UsageError("an entry belongs to a group");
    if (limit) continue;
    for (const Takeable::Part& part : takeable.parts) {
      spans.emplace_back(part.range.lock(), part.first, part.count);
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
    if (mapper_->takes.admit(entry.takeable) || entry.limit) admitted.push_back(std::move(entry));
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
  const auto is_void = [&](const Entry& e) {
    return !e.limit && mapper_->takes.outlook(e.takeable).fate == Taken::Fate::kVoid;
  };
  entries_.erase(std::remove_if(entries_.begin(), entries_.end(), is_void), entries_.end());
  std::vector<std::int64_t> keys;
  for (const Entry& entry : entries_) {
    if (!entry.limit || !mapper_->takes.first_of(entry.takeable, *entry.limit, {1, 1}).parts.empty())
      keys.push_back(entry.key);
  }
  return keys;
}

std::deque<Reclaim::Event> Reclaim::taken() {
  std::lock_guard<std::mutex> lock(mutex);
  return std::exchange(events_, {});
}

// A driver that has no more memory than the budget is not helped by a larger one.
bool Reclaim::is_raised(const PoolExhausted& reason, bool last) {
  const std::size_t missing = reason.missing > 0 ? mapper_->missing(reason.wanted) : 0;
  return missing > 0 && shortage.ask(missing, last, !mapper_->fences.capturing());
}

bool Reclaim::meet(const PoolExhausted& reason, std::size_t before) {
  if (reason.missing == 0) return false;
  std::lock_guard<std::mutex> lock(mutex);
  if (pages_ != before) return true;  // for another thread, which may not need them all
  return take(reason.wanted, reason.missing, true, Events::Kind::kTake) > 0;
}

Reclaim::Outlook Reclaim::outlook() {
  std::lock_guard<std::mutex> lock(mutex);
  return look(~std::size_t{0});
}

void Reclaim::shrink() {
  std::lock_guard<std::mutex> lock(mutex);
  if (const std::size_t missing = mapper_->missing(0)) take(0, missing, false, Events::Kind::kTake);
}

std::size_t Reclaim::page_request() {
  if (!is_requested()) return 0;
  std::lock_guard<std::mutex> lock(mutex);
  const std::size_t missing = mapper_->missing(wanted_);
  if (missing == 0) requested_ = false;
  return missing;
}

std::size_t Reclaim::yield_pages() {
  if (!is_requested()) return 0;
  std::lock_guard<std::mutex> lock(mutex);
  requested_ = false;
  const std::size_t missing = mapper_->missing(wanted_);
  return missing > 0 ? take(std::exchange(wanted_, 0), missing, false, Events::Kind::kYield) : 0;
}

// Pre: the caller holds the lock. Those that other threads lease are counted after the others, which are taken first.
Reclaim::Outlook Reclaim::look(std::size_t enough) {
  Outlook sum;
  Room room = mapper_->takes.room();
  std::vector<Taken> leased;
  const auto add = [&](const Taken& found, std::size_t& pages) {
    if (room.holds(found)) pages += found.pages;
  };
  for (auto entry = entries_.begin(); entry != entries_.end() && sum.ready < enough;) {
    const Taken found = outlook_of(*entry, enough - sum.ready, room);
    if (found.fate == Taken::Fate::kTaken) add(found, sum.ready);
    if (found.fate == Taken::Fate::kLeased) leased.push_back(found);
    entry = found.fate == Taken::Fate::kVoid && !entry->limit ? entries_.erase(entry) : std::next(entry);
  }
  for (const Taken& found : leased) add(found, sum.leased);
  return sum;
}

// Pre: the caller holds the lock.
void Reclaim::request_pages(std::size_t wanted, std::size_t missing) {
  if (!requested_ || wanted > wanted_) mapper_->events.add(Events::Kind::kRequest, missing);
  wanted_ = requested_ ? std::max(wanted_, wanted) : wanted;
  requested_ = true;
}

// Pre: the caller holds the lock. Entries in their order until `missing` pages are free; where they cannot be met, none
// or what there is. Returns the pages.
std::size_t Reclaim::take(std::size_t wanted, std::size_t missing, bool all_or_none, Events::Kind kind) {
  const Outlook seen = look(missing);
  if (seen.ready < missing) {
    if (seen.leased > 0 && (!all_or_none || seen.ready + seen.leased >= missing)) {
      request_pages(wanted, missing - seen.ready);
    }
    if (all_or_none) return 0;
  }
  return take_some(missing, kind, [](const Entry&) { return true; });
}

std::size_t Reclaim::take(const std::vector<std::int64_t>& keys, std::size_t pages) {
  const std::set<std::int64_t> named(keys.begin(), keys.end());
  std::lock_guard<std::mutex> lock(mutex);
  return take_some(pages, Events::Kind::kTake, [&](const Entry& e) { return named.count(e.key) > 0; });
}

// Pre: the caller holds the lock. Chosen entries in their order until `missing` pages are free. Returns the pages.
std::size_t Reclaim::take_some(std::size_t missing, Events::Kind kind,
                               const std::function<bool(const Entry&)>& chosen) {
  std::size_t freed = 0;
  std::exception_ptr failed;
  for (auto entry = entries_.begin(); entry != entries_.end() && freed < missing;) {
    if (!chosen(*entry)) {
      ++entry;
      continue;
    }
    const std::int64_t since = now_ns();
    const Taken found = take_one(*entry, missing - freed, failed);
    if (found.fate == Taken::Fate::kTaken) {
      if (events_.size() == tuning::kTakenKept) events_.pop_front();
      events_.push_back({now_ns(), entry->key, found.pages});
      mapper_->events.add(kind, found.pages, since, entry->key);
      freed += found.pages;
    }
    if (entry->limit && found.fate == Taken::Fate::kTaken) {
      *entry->limit -= std::min(*entry->limit, found.pages);
      continue;  // there may be more
    }
    const bool stays = found.fate == Taken::Fate::kLater || found.fate == Taken::Fate::kLeased;
    entry = stays || entry->limit ? std::next(entry) : entries_.erase(entry);
  }
  pages_ += freed;
  if (freed == 0 && failed) std::rethrow_exception(failed);
  return freed;
}

// The entry, or of a divisible one up to so many pages. Where the driver refuses: kLater, and why in `failed`.
Taken Reclaim::take_one(Entry& entry, std::size_t missing, std::exception_ptr& failed) {
  Takeable part;
  if (entry.limit) {
    part = mapper_->takes.first_of(entry.takeable, std::min(*entry.limit, missing), mapper_->takes.room());
    if (part.parts.empty()) return {Taken::Fate::kVoid, 0};
  }
  for (int attempt = 0; attempt < 2; ++attempt) {  // a driver call that failed once deserves a second try
    try {
      // Then without the peer, which may be what fails.
      return mapper_->takes.take(entry.limit ? part : entry.takeable, attempt == 0);
    } catch (const PoolExhausted&) {  // of the host: the driver has less than the budget allows
      if (!entry.limit || missing == 1) break;
      return take_one(entry, 1, failed);
    } catch (const DriverError&) {
      failed = std::current_exception();
    }
  }
  return {Taken::Fate::kLater, 0};
}

// What taking the entry, or of a divisible one up to `enough` pages, would come to.
Taken Reclaim::outlook_of(const Entry& entry, std::size_t enough, const Room& room) {
  if (!entry.limit) return mapper_->takes.outlook(entry.takeable);
  const Takeable part = mapper_->takes.first_of(entry.takeable, std::min(*entry.limit, enough), room);
  return part.parts.empty() ? Taken{Taken::Fate::kLater, 0} : mapper_->takes.outlook(part);
}

void Reclaim::check() {
  std::lock_guard<std::mutex> lock(mutex);
  for (const Entry& entry : entries_) {
    if (!entry.limit)
      mapper_->takes.check(entry.takeable);  // the others are looked at piece by piece as they are taken
  }
}

}  // namespace ballonet
