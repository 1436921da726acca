// Fences for any thread: waiting for the work of streams.
//
// Guarantees: no thread waits with the mapper's lock; a fence whose wait was interrupted can be waited for again.
//
// Lock: functions with a Section run within it, and let go of its lock while they wait (Note [Waiting] in
// address_space.h); `streams` is used within one. All others take the mapper's lock themselves.
#pragma once

#include <vector>

#include "driver/streams.h"
#include "mapping/address_space.h"
#include "mapping/background.h"

namespace ballonet {

class Fences {
 public:
  Fences(AddressSpace& space, Background& background);
  ~Fences();
  Fences(const Fences&) = delete;
  Fences& operator=(const Fences&) = delete;

  Streams streams;
  void await(Section& in, const Awaited& awaited);
  // Waits for everything that was submitted. False, and nothing waited for, while a stream is being captured.
  bool quiesce(Section& in);
  // Synchronises the context for the fences that want it. See streams.h, Note [Streams without
  // events]. False: later.
  bool synchronize_streams(Section& in);

  // Notes a stream, without a lock where it was noted before.
  void note_stream(CUstream stream);
  // Notes the stream if the address lies in a range.
  void note_stream_at(CUdeviceptr address, CUstream stream);
  // A stream of the device's context; it lasts as long as that.
  CUstream create_stream();
  // Tells the order checker, where there is one, what work on a stream uses.
  void note_use(CUdeviceptr address, std::size_t size, CUstream stream, bool write);
  // Tells it of all backed pieces of a range; without an order checker, notes the stream.
  void note_use(Range& range, CUstream stream, bool write);
  void synchronize();

  // Over some streams, for blocks used across streams; see live_blocks.h.
  Fence over(const std::vector<CUstream>& some);
  bool passed(Fence& fence);
  void wait(Fence& fence);
  // The two halves of it, for a fence that may be gone by the time that it has passed.
  Awaited awaited(Fence& fence) {
    Section in(space_);
    return streams.awaited(fence);
  }
  void wait(const Awaited& awaited) {
    Section in(space_);
    await(in, awaited);
  }
  void recycle(Fence& fence) {
    const std::lock_guard lock(space_.mutex);
    streams.recycle(fence);
  }
  // What `stream` is given from now on waits for the fence.
  void before(CUstream stream, const Fence& fence);
  bool capturing() {
    Section in(space_);
    return streams.capturing();
  }
  // Announce captures: see Note [Fences and captures] in streams.h.
  void captures_may_begin() {
    const std::lock_guard lock(space_.mutex);
    streams.captures_may_begin();
  }
  void captures_are_over(std::size_t count) {
    const std::lock_guard lock(space_.mutex);
    streams.captures_are_over(count);
  }

 private:
  AddressSpace& space_;
  Background& background_;
};

}  // namespace ballonet
