#include "uses.h"

#include <algorithm>

namespace ballonet::standin {

Uses::Map::const_iterator Uses::first_touching(std::uint64_t from) const {
  auto at = intervals_.upper_bound(from);
  if (at != intervals_.begin() && std::prev(at)->second.to > from) --at;
  return at;
}

bool Uses::conflict(std::uint64_t from, std::uint64_t to, std::uint32_t stream, const Clock& clock, bool write,
                    Conflict* found) const {
  for (auto at = first_touching(from); at != intervals_.end() && at->first < to; ++at) {
    const Interval& interval = at->second;
    const auto unordered = [&](const Stamp& earlier) { return earlier.stream != stream && !covers(clock, earlier); };
    const Stamp* culprit = unordered(interval.write) ? &interval.write : nullptr;
    const bool wrote = culprit != nullptr;
    if (!wrote && write) {
      const auto read = std::find_if(interval.reads.begin(), interval.reads.end(), unordered);
      if (read != interval.reads.end()) culprit = &*read;
    }
    if (culprit == nullptr) continue;
    *found = Conflict{std::max(from, at->first), std::min(to, interval.to), *culprit, wrote};
    return true;
  }
  return false;
}

bool Uses::uncovered(std::uint64_t from, std::uint64_t to, const Clock& clock, Conflict* found) const {
  constexpr std::uint32_t kNoStream = ~0u;
  return conflict(from, to, kNoStream, clock, true, found);
}

// Makes `at` a boundary; returns the first interval that starts there or after.
Uses::Map::iterator Uses::cut(std::uint64_t at) {
  auto next = intervals_.lower_bound(at);
  if (next == intervals_.begin()) return next;
  Interval& before = std::prev(next)->second;
  if (before.to <= at) return next;
  next = intervals_.emplace_hint(next, at, before);
  std::prev(next)->second.to = at;
  return next;
}

void Uses::drop_covered(Interval& interval, const Clock& host) {
  if (covers(host, interval.write)) interval.write = Stamp{};
  auto& reads = interval.reads;
  reads.erase(std::remove_if(reads.begin(), reads.end(), [&](const Stamp& read) { return covers(host, read); }),
              reads.end());
}

// Joins the interval with the one before it if they touch and are alike; returns the interval that then holds it.
Uses::Map::iterator Uses::join_before(Map::iterator at) {
  if (at == intervals_.begin()) return at;
  const auto before = std::prev(at);
  if (before->second.to != at->first || !before->second.same_uses(at->second)) return at;
  before->second.to = at->second.to;
  intervals_.erase(at);
  return before;
}

void Uses::stamp(std::uint64_t from, std::uint64_t to, Stamp use, bool write, const Clock& host) {
  if (intervals_.size() >= sweep_at_) sweep(host);
  auto at = cut(from);
  const auto end = cut(to);
  if (write) {
    intervals_.erase(from == to ? end : at, end);
    at = join_before(intervals_.emplace_hint(end, from, Interval{to, use, {}}));
  } else {
    for (std::uint64_t reached = from; reached < to;) {
      if (at == end || at->first > reached) {
        const std::uint64_t next = at == end ? to : at->first;
        at = intervals_.emplace_hint(at, reached, Interval{next, Stamp{}, {}});
      }
      Interval& interval = at->second;
      reached = interval.to;
      drop_covered(interval, host);
      if (!(interval.write == use)) {  // one's own write of the same epoch says as much
        auto mine = std::find_if(interval.reads.begin(), interval.reads.end(),
                                 [&](const Stamp& read) { return read.stream >= use.stream; });
        if (mine != interval.reads.end() && mine->stream == use.stream) {
          mine->epoch = use.epoch;
        } else {
          interval.reads.insert(mine, use);
        }
      }
      at = std::next(join_before(at));
    }
  }
  if (end != intervals_.end()) join_before(end);
}

void Uses::forget(std::uint64_t from, std::uint64_t to) {
  const auto at = cut(from);
  intervals_.erase(at, cut(to));
}

void Uses::sweep(const Clock& host) {
  for (auto at = intervals_.begin(); at != intervals_.end();) {
    drop_covered(at->second, host);
    at = at->second.unused() ? intervals_.erase(at) : std::next(join_before(at));
  }
  sweep_at_ = std::max<std::size_t>(1024, 2 * intervals_.size());
}

}  // namespace ballonet::standin
