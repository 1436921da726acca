// The driver's side of a device, opened in the order that CUDA asks for and closed in the reverse: the primary context,
// what the device can do, and the two things of the driver's that ballonet keeps for itself, a copy stream and one page
// of addresses.
//
// Note [Host pages and the CPU]
// The driver takes the address of a host page for host memory (its pointer attribute says so), and a copy between two
// such may be made by the CPU, which has no access to mapped memory unless it is given some. So a host page is always
// opened for the device and for the CPU.
//
// Note [Peer pages]
// A peer is a second place of device memory: another device whose memory this one can reach (`cuDeviceCanAccessPeer`),
// or this device itself, out of a budget of its own. Its pages are created there and opened for this device alone: all
// kernels and copies are in this device's context, the other one has none and computes nothing. That is what CUDA asks
// for (its vectorAddMMAP example); `cudaEnablePeerAccess` and the Peer variants of copies are for memory that is not
// opened. Whether the driver really does it is tried once, with a page, when the device is opened.
//
// Note [Host pages are tried]
// The attribute says what the driver supports, not what this process is allowed: a container that blocks
// `get_mempolicy`, a NUMA node without memory, or a driver that refuses at create are common. So one page is created,
// mapped, opened and copied to and from when the device is opened. Where that fails there are no host pages, and
// `host_refused` says why, instead of a failure when they are needed.
//
// Guarantees: its facts about the device are true, and the context exists, for as long as it lives.
//
// Lock: none; it does not change once it is made.
#pragma once

#include <array>
#include <optional>
#include <string>

#include "driver/driver.h"

namespace ballonet {

// Drops one optional property of new memory that a driver may refuse: first that network cards reach it, then that
// other processes can open it. False where there is none left to drop.
bool ask_for_less(CUmemAllocationProp& place);

struct Context {
  // Throws DriverUnavailable where the device cannot map memory, UsageError for a page size that it cannot have,
  // DriverError. `peer`: the device of the peer's pages; where that cannot be `peer_refused` says why, and there is
  // none. `wants_host_pages`: false where the driver claims them wrongly.
  Context(const Driver& driver, int ordinal, std::size_t page_size, const BallonetStandinConfig& standin,
          std::optional<int> peer = {}, bool wants_host_pages = true);
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  // Opens mapped pages of one place for the device, those of the host for the CPU too. See Note [Host pages and the
  // CPU].
  void open_page(CUdeviceptr at, std::size_t size, bool host) const;

  // The device of the peer's pages; none where there is no peer.
  std::optional<int> peer() const { return peer_pages ? std::optional<int>(peer_place.location.id) : std::nullopt; }

  const Driver& driver;
  const int ordinal;
  CUdevice device = 0;
  CUcontext handle = nullptr;
  std::size_t total_memory = 0;
  bool host_pages = false;
  CUmemAllocationProp device_place{};
  CUmemAllocationProp host_place{};
  std::string host_refused;  // why there are no host pages
  bool peer_pages = false;
  CUmemAllocationProp peer_place{};
  std::string peer_refused;
  std::array<CUmemAccessDesc, 2> access{};  // for the device; for the CPU, which only host pages can be opened for
  CUstream copy_stream = nullptr;
  CUdeviceptr scratch = 0;  // addresses of one page, where `move` fills a page before it takes its place
  std::size_t page_size;

 private:
  void place_pages(CUmemAllocationProp& place, CUdevice at) const;
  void open_host(bool wanted);
  void open_peer(int ordinal);
  void check_granularity(const CUmemAllocationProp& place, const char* whose) const;
  template <class Use>
  void try_page(CUmemAllocationProp& place, CUdeviceptr at, const char* whose, Use use);
  void copy_both_ways(CUdeviceptr there);
};

}  // namespace ballonet
