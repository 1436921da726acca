// The driver's side of a device, opened in the order that CUDA asks for and closed in the reverse: the primary context,
// what the device can do, and the two things of the driver's that ballonet keeps for itself, a copy stream and one page
// of addresses.
//
// Note [Host pages and the CPU]
// The driver takes the address of a host page for host memory (its pointer attribute says so), and a copy between two
// such may be made by the CPU, which has no access to mapped memory unless it is given some. So whatever opens a host
// page opens it for the device and for the CPU.
//
// Note [Peer pages]
// A peer is a second place of device memory: another device whose memory this one can reach (`cuDeviceCanAccessPeer`),
// or this device itself, out of a budget of its own. Its pages are created there and opened for this device alone: all
// kernels and copies are in this device's context, the other one has none and computes nothing. That is what CUDA asks
// for (its vectorAddMMAP example); `cudaEnablePeerAccess` and the Peer variants of copies are for memory that is not
// opened. Whether the driver really does it is tried once, with a page, when the device is opened.
#pragma once

#include <array>
#include <optional>
#include <string>

#include "driver.h"

namespace ballonet {

struct Context {
  // Throws DriverUnavailable where the device cannot map memory, UsageError for a page size that it cannot have,
  // DriverError.
  // `peer`: of which device the peer's pages are; where that cannot be `peer_refused` says why, and there is none.
  // `wants_host_pages`: false where the driver's word for them is not to be believed.
  Context(const Driver& driver, int ordinal, std::size_t page_size, const BallonetStandinConfig& standin,
          std::optional<int> peer = {}, bool wants_host_pages = true);
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  const Driver& driver;
  CUdevice device = 0;
  CUcontext handle = nullptr;
  std::size_t total_memory = 0;
  bool host_pages = false;
  CUmemAllocationProp device_place{};
  CUmemAllocationProp host_place{};
  bool peer_pages = false;
  CUmemAllocationProp peer_place{};
  std::string peer_refused;
  std::array<CUmemAccessDesc, 2> access{};  // for the device; for the CPU, which only host pages can be opened for
  CUstream copy_stream = nullptr;
  CUdeviceptr scratch = 0;  // addresses of one page, where `move` fills a page before it takes its place
  std::size_t page_size;

 private:
  void open_peer(int ordinal);
  void try_peer();
};

}  // namespace ballonet
