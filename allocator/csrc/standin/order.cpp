#include "order.h"

#include <algorithm>
#include <cstdio>
#include <string>

#include "results.h"

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

namespace {

using ull = unsigned long long;

void join(Clock& into, const Clock& from) {
  if (into.size() < from.size()) into.resize(from.size());
  for (std::size_t i = 0; i < from.size(); ++i) into[i] = std::max(into[i], from[i]);
}

std::string name(std::uint32_t stream) {
  if (stream == 0) return "stream 0";
  char text[48];
  std::snprintf(text, sizeof text, "stream %#llx",
                static_cast<ull>(reinterpret_cast<std::uintptr_t>(stream_handle(stream))));
  return text;
}

// Where the physical bytes of a conflict lie in the address range of the use.
std::uint64_t address_of(const Use& use, const Run& run, std::uint64_t offset) {
  std::uint64_t address = use.address;
  for (const Run& before : *use.runs) {
    if (&before == &run) break;
    address += before.size;
  }
  return address + (offset - run.offset);
}

}  // namespace

CUstream stream_handle(std::uint32_t index) {
  constexpr std::uintptr_t kBase = 0x5e0000000000;  // no address of anything: a handle is never followed
  return index == 0 ? nullptr : reinterpret_cast<CUstream>(kBase + std::uintptr_t{index} * 16);
}

std::uint32_t Order::add_stream() {
  streams_.emplace_back();
  return static_cast<std::uint32_t>(streams_.size() - 1);
}

CUresult Order::submit(const char* function, std::uint32_t stream, const Use* uses, std::size_t count) {
  Stream& mine = streams_[stream];
  join(mine.clock, host_);
  for (const Use* use = uses; use != uses + count; ++use) {
    for (const Run& run : *use->runs) {
      Conflict found;
      if (run.store == Store::kPlain) continue;  // not ours: it may be freed and handed out again unseen
      if (!by_store(run.store).conflict(run.offset, run.offset + run.size, stream, mine.clock, use->write, &found))
        continue;
      const std::uint64_t from = address_of(*use, run, found.from);
      return refuse(
          cuda::kIllegalState,
          "%s: %s %s [%#llx, %#llx), which %s %s before, and nothing orders the one after the other; record an event "
          "on %s and let %s wait for it",
          function, name(stream).c_str(), use->write ? "writes" : "reads", ull{from},
          ull{from + (found.to - found.from)}, name(found.earlier.stream).c_str(),
          found.earlier_wrote ? "wrote" : "read", name(found.earlier.stream).c_str(), name(stream).c_str());
    }
  }
  const Stamp now{stream, mine.epoch};
  for (const Use* use = uses; use != uses + count; ++use) {
    if (use->runs->front().store == Store::kPlain) continue;
    for (const Run& run : *use->runs)
      by_store(run.store).stamp(run.offset, run.offset + run.size, now, use->write, host_);
    by_address_.stamp(use->address, use->address + use->size, now, false, host_);
    mine.used = true;
  }
  return cuda::kSuccess;
}

Clock Order::publish(std::uint32_t stream) {
  Stream& mine = streams_[stream];
  Clock published = mine.clock;
  if (published.size() <= stream) published.resize(stream + 1);
  if (mine.used) {
    published[stream] = mine.epoch++;
    mine.used = false;
  } else {
    published[stream] = mine.epoch - 1;
  }
  return published;
}

Clock Order::publish_all() {
  Clock all;
  for (std::uint32_t stream = 0; stream < streams_.size(); ++stream) join(all, publish(stream));
  return all;
}

void Order::join_stream(std::uint32_t stream, const Clock& clock) { join(streams_[stream].clock, clock); }

void Order::join_host(const Clock& clock) { join(host_, clock); }

CUresult Order::may_unmap(std::uint64_t address, std::uint64_t size) const {
  Conflict found;
  if (!by_address_.uncovered(address, address + size, host_, &found)) return cuda::kSuccess;
  return refuse(
      cuda::kIllegalState,
      "cuMemUnmap: %s uses [%#llx, %#llx) and the host has not waited for that; record an event on %s after its "
      "work and query or synchronise it before unmapping",
      name(found.earlier.stream).c_str(), ull{found.from}, ull{found.to}, name(found.earlier.stream).c_str());
}

}  // namespace ballonet::standin
