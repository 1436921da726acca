#include "mapping/retirement.h"

#include <algorithm>
#include <cassert>
#include <utility>

#include "base/tuning.h"

namespace ballonet {

Fences::Fences(AddressSpace& space, Background& background)
    : streams(space.driver), space_(space), background_(background) {
  streams.note(space.context.copy_stream);  // a page that is copied does not leave before
}

Fences::~Fences() {
  DriverScope scope(space_.driver, space_.context.handle);
  streams.close();
}

// Should another thread see the fence pass meanwhile, its events are recorded again: this waits for too much then,
// never for too little.
void Fences::await(Section& in, const Awaited& awaited) {
  if (awaited.events.empty() && awaited.sync <= streams.syncs_done()) return;
  const std::uint64_t sync = awaited.sync > streams.syncs_done() ? streams.begin_sync() : 0;
  {
    Unlocked unlocked(in.lock);
    streams.wait(awaited.events);
    if (sync != 0) space_.driver.cuCtxSynchronize().or_throw("waiting for every stream before pages change hands");
  }
  if (sync != 0) streams.end_sync(sync);
}

bool Fences::quiesce(Section& in) {
  if (streams.capturing()) return false;
  Fence fence = streams.fence(streams.seen());
  try {
    await(in, streams.awaited(fence));
  } catch (...) {
    streams.recycle(fence);
    throw;
  }
  streams.recycle(fence);
  return true;
}

bool Fences::synchronize_streams(Section& in) {
  try {
    await(in, {{}, streams.syncs_done() + 1});
  } catch (const DriverError&) {
    return false;
  }
  return true;
}

void Fences::note_stream(CUstream stream) {
  if (streams.known(stream)) return;
  const std::lock_guard lock(space_.mutex);
  streams.note(stream);
}

void Fences::note_stream_at(CUdeviceptr address, CUstream stream) {
  if (streams.known(stream)) return;
  const std::lock_guard lock(space_.mutex);
  if (space_.range_at(address) != nullptr) streams.note(stream);
}

CUstream Fences::create_stream() {
  DriverScope scope(space_.driver, space_.context.handle);
  CUstream stream = nullptr;
  space_.driver.cuStreamCreate(&stream, cuda::kStreamNonBlocking).or_throw("creating a stream");
  return stream;
}

void Fences::note_use(CUdeviceptr address, std::size_t size, CUstream stream, bool write) {
  if (!space_.driver.is_standin()) return;
  DriverScope scope(space_.driver, space_.context.handle);
  space_.driver.note_use(address, size, stream, write);
}

void Fences::note_use(Range& range, CUstream stream, bool write) {
  if (!space_.driver.is_standin()) return note_stream(stream);
  Section in(space_);
  const std::size_t end = range.addresses.size();
  for (std::size_t from = 0, to = 0; from < end; from = to + 1) {
    for (to = from; to < end && leads_somewhere(range.addresses[to].leads_to);) ++to;
    if (to == from) continue;
    space_.driver.note_use(space_.address(range.addresses, from), (to - from) * space_.page_size, stream, write);
  }
}

void Fences::synchronize() {
  DriverScope scope(space_.driver, space_.context.handle);
  space_.driver.cuCtxSynchronize().or_throw("waiting for the device");
}

Fence Fences::over(const std::vector<CUstream>& some) {
  Section in(space_);
  Fence made = streams.fence(some);
  if (streams.sync_wanted()) background_.notify();
  return made;
}

bool Fences::passed(Fence& fence) {
  Section in(space_);
  const bool passed = streams.passed(fence);
  if (!passed && streams.sync_wanted()) background_.notify();
  return passed;
}

void Fences::wait(Fence& fence) {
  Section in(space_);
  await(in, streams.awaited(fence));
  streams.recycle(fence);
}

// Not under the lock: on the stand-in the calling thread is stream 0, and waits here. For the events as in `await`.
void Fences::before(CUstream stream, const Fence& fence) {
  Section in(space_);
  const std::vector<CUevent> events = fence.events;
  Unlocked unlocked(in.lock);
  // Nothing that is captured may wait for what is not: then the host does.
  if (!events.empty() && streams.capturing(std::vector<CUstream>{stream})) return streams.wait(events);
  for (CUevent event : events) {
    // Where the driver refuses, the host waits.
    if (!space_.driver.cuStreamWaitEvent(stream, event, 0U).ok()) streams.wait({event});
  }
}

namespace {

constexpr std::size_t kAll = ~std::size_t{0};

}  // namespace

void Retirement::retire(Range& range, const Spans& spans, bool unseen) {
  assert(space_.mutex.held());
  const std::uint32_t ticket = next_ticket_++;
  bool any = false;
  for (const Span& span : spans) {
    for (std::size_t i = span.first; i < std::min(span.first + span.count, range.addresses.size()); ++i) {
      const LeadsTo leads_to = range.addresses[i].leads_to;
      if (leads_to == LeadsTo::kKept) space_.table.forget_ahead(range.addresses, i);
      if (leads_somewhere(leads_to) && space_.retire(range.addresses, i, ticket)) any = true;
    }
  }
  if (!any) return;
  const bool shares = !unseen && !queue_.empty() && !queue_.back().fence->recorded;
  const auto made = [&] {
    return std::make_shared<Fence>(unseen ? fences_.streams.fence_over_all() : Streams::fence());
  };
  auto fence = shares ? queue_.back().fence : made();
  queue_.push_back({std::move(fence), range.shared_from_this(), spans, ticket});
}

void Retirement::reap_later(Section& in) {
  if (!background_.running()) {
    reap(in);
  } else if (!queue_.empty()) {
    background_.notify();
  }
}

std::size_t Retirement::reap(Section& in) {
  std::size_t freed = 0;
  // A retirement whose unmap fails goes to the back of the queue, and is met once per reap.
  for (std::size_t left = queue_.size(); left > 0 && fences_.streams.passed(*queue_.front().fence); --left) {
    Entry current = std::move(queue_.front());
    queue_.pop_front();
    if (finish(current, kAll, freed) == Left::kNone) {
      in.ended.push_back(std::move(current.range));
    } else {
      queue_.push_back(std::move(current));
    }
  }
  return freed;
}

std::size_t Retirement::reap_waiting(Section& in) {
  Awaited all;
  const Fence* last = nullptr;
  for (Entry& each : queue_) {
    if (std::exchange(last, each.fence.get()) == each.fence.get()) continue;
    const Awaited one = fences_.streams.awaited(*each.fence);
    all.events.insert(all.events.end(), one.events.begin(), one.events.end());
    all.sync = std::max(all.sync, one.sync);
  }
  fences_.await(in, all);
  return reap(in);
}

void Retirement::shelve_passed(Section& in) {
  for (auto each = queue_.begin(); each != queue_.end();) {
    std::size_t freed = 0;
    const bool ready = each->range->closed && each->range->owner == Owner::kKv &&
                       fences_.streams.passed(*each->fence) && finish(*each, kAll, freed) == Left::kNone;
    if (ready) in.ended.push_back(std::move(each->range));
    each = ready ? queue_.erase(each) : std::next(each);
  }
}

Background::Next Retirement::step(Section& in) {
  if (queue_.empty()) return Background::Next::kNothing;
  Entry& oldest = queue_.front();
  if (!fences_.streams.passed(*oldest.fence)) return Background::Next::kLater;
  std::size_t freed = 0;
  const Left left = finish(oldest, tuning::kPiecesPerLock, freed);
  if (left == Left::kSome) return Background::Next::kMore;
  Entry finished = std::move(oldest);
  queue_.pop_front();
  if (left == Left::kRefused) {  // as in `reap`
    queue_.push_back(std::move(finished));
    return Background::Next::kLater;
  }
  in.ended.push_back(std::move(finished.range));
  return Background::Next::kMore;
}

// The pieces that still retire with the entry: others were taken back meanwhile. Until the visitor says false.
template <class Visit>
void Retirement::visit(const Entry& entry, Visit visit) {
  const Stretch& addresses = entry.range->addresses;
  for (const Span& span : entry.spans) {
    for (std::size_t i = span.first; i < std::min(span.first + span.count, addresses.size()); ++i) {
      if (addresses[i].leads_to == LeadsTo::kRetiring && addresses[i].ticket == entry.ticket && !visit(i)) return;
    }
  }
}

// At most so many pieces of a retirement that has passed: they are unmapped, or kept for a cached range.
Retirement::Left Retirement::finish(Entry& entry, std::size_t most, std::size_t& freed) {
  Left left = Left::kNone;
  Range& range = *entry.range;
  visit(entry, [&](std::size_t i) {
    if (most-- == 0) {
      left = Left::kSome;
      return false;
    }
    if (cached_.may_keep(range, i)) {
      space_.keep(range.addresses, i, false);
      ++freed;
    } else if (space_.vacate(range.addresses, i)) {
      ++freed;
    } else {
      left = Left::kRefused;
    }
    return true;
  });
  if (left == Left::kNone) cached_.keep_closed(range);
  return left;
}

void Retirement::check() const {
  std::size_t queued = 0, retiring = 0;
  for (const Entry& entry : queue_) {
    visit(entry, [&](std::size_t) {
      ++queued;
      return true;
    });
  }
  for (const Range* range : space_.ranges) retiring += range->addresses.count(LeadsTo::kRetiring);
  if (queued != retiring)
    throw InvariantBroken(format("%zu pieces are retiring, %zu wait in the queue for it", retiring, queued));
}

}  // namespace ballonet
