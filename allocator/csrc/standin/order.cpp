#include "order.h"

#include <algorithm>
#include <cstdio>
#include <string>

#include "refusal.h"

namespace ballonet::standin {
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
