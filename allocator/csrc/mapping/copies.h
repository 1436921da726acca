// Copies between the device, the host and the peer on streams of their own, their counts, and registered host memory
// that they may read.
//
// Guarantees: a copy's pages stay where they are until it is done, as every fence covers its stream.
//
// Lock: these take the mapper's, and let go of it while they submit and wait; `count`, `registered`, `copied`,
// `submitted` and `submitting` need it held.
#pragma once

#include <map>
#include <optional>
#include <vector>

#include "mapping/retirement.h"

namespace ballonet {

// A copy of bytes between two addresses that the driver knows, or host memory.
struct Copy {
  CUdeviceptr to, from;
  std::size_t size;
};

struct Copied {
  unsigned long long weights_h2d = 0, weights_d2h = 0, kv_h2d = 0, kv_d2h = 0;
  unsigned long long kv_p2d = 0, kv_d2p = 0, kv_p2h = 0;  // p: the peer
};

class Copies {
 public:
  Copies(AddressSpace& space, Fences& fences) : space_(space), fences_(fences) {}
  ~Copies();
  Copies(const Copies&) = delete;
  Copies& operator=(const Copies&) = delete;

  // The streams of all copies that are submitted here: one for each direction. Throws DriverError.
  void open_streams();
  // Submits copies, as Transfer::copy. Returns a fence behind them.
  Fence submit(const std::vector<Copy>& parts, std::optional<CUstream> after, Owner owner, Place to);

  // Register host memory, for HostMemory. Throw DriverError.
  void register_host(const void* memory, std::size_t size);
  void unregister_host(const void* memory);
  // Do the bytes lie in one registration?
  bool registered(CUdeviceptr address, std::size_t size) const;

  // Counts bytes that were copied for an owner. Copies within the host, as from a file to its backing, do not count.
  void count(Owner owner, Place from, Place to, std::size_t size);
  const Copied& copied() const { return copied_; }
  // How often copies began to be submitted; do threads submit some now, without the lock?
  std::uint64_t submitted() const { return submitted_; }
  bool submitting() const { return submitting_ != 0; }

 private:
  class Submitting;
  Place place_at(CUdeviceptr address, Place elsewhere) const;

  AddressSpace& space_;
  Fences& fences_;
  CUstream to_device_ = nullptr, from_device_ = nullptr;
  std::map<CUdeviceptr, std::size_t> registered_;  // host memory, and its size
  Copied copied_;
  std::uint64_t submitted_ = 0;
  std::size_t submitting_ = 0;
};

}  // namespace ballonet
