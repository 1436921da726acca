// Every stream that may touch a page, and fences over them: the only way in which a page learns that it is no longer
// used.
//
// Note [Fences]
// Unmapping orders nothing against running work, so a page leaves an address only after a fence: one event on every
// stream ever seen, recorded after the last use was submitted. A fence is made per retirement, never per free. While
// a stream is being captured no event may be recorded on it, nor on the legacy stream where that would join, so the
// fence stays open and is recorded by the first look at it after the capture; it then waits for more than it must,
// never for less. A capture may begin on another thread between that look and the record: then the event belongs to the
// graph and never comes, which the fence's next look is told, and it is recorded anew. Where an event cannot be made or
// recorded, the fence's first look synchronises the context instead.
#pragma once

#include <vector>

#include "driver.h"

namespace ballonet {

struct Fence {
  std::vector<CUevent> events;
  bool recorded = false;
};

// Not thread-safe: used under the mapper's lock, with the device's context current.
class Streams {
 public:
  explicit Streams(const Driver& driver) : driver_(driver) {}

  void note(CUstream stream);
  void forget(CUstream stream);  // it is about to be destroyed, and its work is done

  Fence fence();                                   // over every stream seen
  Fence fence(const std::vector<CUstream>& some);  // over these
  bool passed(Fence& fence);                       // never blocks, but for a context synchronisation where events fail
  // The same, looked at more than once: a stream that is idle reaches an event within microseconds, and looking
  // disturbs nothing, while a wait is one of the host.
  bool glance(Fence& fence);
  // Blocks. Post: passed. Throws UsageError while a stream is being captured, DriverError.
  void wait(Fence& fence);
  // Blocks until these were reached. The only one that any thread may call at any time. Throws DriverError.
  void wait(const std::vector<CUevent>& events) const;
  bool capturing() const { return capturing(seen_); }
  bool capturing(const std::vector<CUstream>& some) const;
  // Takes back the events of a fence that nobody will look at again.
  void recycle(Fence& fence);
  // Destroys spare events. Call once, before the context goes.
  void close();

 private:
  bool record(Fence& fence, const std::vector<CUstream>& streams);

  const Driver& driver_;
  std::vector<CUstream> seen_{nullptr};
  std::vector<CUevent> spare_;
};

}  // namespace ballonet
