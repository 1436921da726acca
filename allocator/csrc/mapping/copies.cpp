#include "mapping/copies.h"

namespace ballonet {

Copies::~Copies() {
  DriverScope scope(space_.driver, space_.context.handle);
  for (CUstream stream : {to_device_, from_device_}) {
    if (stream != nullptr) space_.driver.cuStreamDestroy(stream);
  }
}

void Copies::open_streams() {
  for (CUstream* stream : {&to_device_, &from_device_}) {
    const std::lock_guard lock(space_.mutex);
    if (*stream != nullptr) continue;
    *stream = fences_.create_stream();
    fences_.streams.note(*stream);  // a page that is copied to or from does not leave before
  }
}

// A thread that submits copies; made and ended with the lock held.
class Copies::Submitting {
 public:
  explicit Submitting(Copies& copies) : copies_(copies) {
    ++copies_.submitted_;
    ++copies_.submitting_;
  }
  ~Submitting() { --copies_.submitting_; }
  Submitting(const Submitting&) = delete;
  Submitting& operator=(const Submitting&) = delete;

 private:
  Copies& copies_;
};

// The copies are submitted without the lock: the driver may read plain memory before it returns.
Fence Copies::submit(const std::vector<Copy>& parts, std::optional<CUstream> after, Owner owner, Place to) {
  const CUstream stream = to == Place::kDevice ? to_device_ : from_device_;
  const Driver& driver = space_.driver;
  Streams& streams = fences_.streams;
  Section in(space_);
  if (after) streams.note(*after);
  const std::vector<CUstream> earlier = after ? std::vector<CUstream>{*after} : streams.seen();
  Fence before = streams.fence(earlier);
  // Asked once there is an event: one that belongs to a capture would draw the copies into its graph.
  if (streams.capturing(earlier)) {
    streams.recycle(before);
    throw UsageError("nothing can be copied for a stream that is being captured");
  }
  try {
    if (!before.recorded || before.sync != 0) fences_.await(in, streams.awaited(before));
    const Submitting submitting(*this);
    Unlocked unlocked(in.lock);
    for (CUevent event : before.events) {
      driver.cuStreamWaitEvent(stream, event, 0U).or_throw("ordering a copy after what runs");
    }
    for (const Copy& part : parts) {
      driver.cuMemcpyAsync(part.to, part.from, part.size, stream)
          .or_throw(format("copying %s", in_units(part.size).c_str()));
    }
  } catch (...) {
    {
      Unlocked unlocked(in.lock);
      driver.cuStreamSynchronize(stream);
    }
    streams.recycle(before);
    throw;
  }
  const Place other = to == Place::kHost ? Place::kDevice : Place::kHost;
  for (const Copy& part : parts) count(owner, place_at(part.from, other), place_at(part.to, to), part.size);
  streams.recycle(before);
  Fence done = streams.fence({stream});
  if (!done.recorded || done.sync != 0) fences_.await(in, streams.awaited(done));
  return done;
}

// Where the page is that an address leads to; `elsewhere` where it is not ours, as registered memory is not.
Place Copies::place_at(CUdeviceptr address, Place elsewhere) const {
  const Range* range = space_.range_at(address);
  if (range == nullptr) return elsewhere;
  const std::size_t piece = (address - range->base) / space_.page_size;
  return piece < range->addresses.size() ? range->addresses[piece].place : elsewhere;
}

void Copies::register_host(const void* memory, std::size_t size) {
  DriverScope scope(space_.driver, space_.context.handle);
  space_.driver.cuMemHostRegister(const_cast<void*>(memory), size, cuda::kRegisterReadOnly)
      .or_throw(format("registering %s of host memory to copy from", in_units(size).c_str()));
  const std::lock_guard lock(space_.mutex);
  registered_[reinterpret_cast<CUdeviceptr>(memory)] = size;
}

// Nothing is taken from it any more, and copies that were submitted are waited for, on streams that are never captured:
// that breaks no capture. Their failure is reported where their end is waited for.
void Copies::unregister_host(const void* memory) {
  Section in(space_);
  const auto entry = registered_.extract(reinterpret_cast<CUdeviceptr>(memory));
  const CUstream streams[] = {to_device_, from_device_, space_.context.copy_stream};
  CUresult done;
  {
    Unlocked unlocked(in.lock);
    for (CUstream stream : streams) {
      if (stream != nullptr) space_.driver.cuStreamSynchronize(stream);
    }
    done = space_.driver.cuMemHostUnregister(const_cast<void*>(memory)).code();
  }
  if (done != cuda::kSuccess && entry) registered_[entry.key()] = entry.mapped();
  space_.driver.judge(Fn::cuMemHostUnregister, done).or_throw("unregistering host memory");
}

bool Copies::registered(CUdeviceptr address, std::size_t size) const {
  auto found = registered_.upper_bound(address);
  if (found == registered_.begin()) return false;
  --found;
  const std::size_t offset = address - found->first;
  return offset <= found->second && size <= found->second - offset;
}

void Copies::count(Owner owner, Place from, Place to, std::size_t size) {
  if (from == to) return;
  const bool down = to == Place::kHost;
  if (owner == Owner::kWeights) (down ? copied_.weights_d2h : copied_.weights_h2d) += size;
  if (owner != Owner::kKv) return;
  if (from == Place::kPeer) {
    (down ? copied_.kv_p2h : copied_.kv_p2d) += size;
  } else if (to == Place::kPeer) {
    copied_.kv_d2p += size;
  } else {
    (down ? copied_.kv_d2h : copied_.kv_h2d) += size;
  }
}

}  // namespace ballonet
