#include "mapping/fences.h"

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

}  // namespace ballonet
