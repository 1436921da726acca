// What the environment says of the simulated device, read once at cuInit.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

namespace simgpu {

struct Config {
  int devices = 2;                         // SIMGPU_DEVICES: 1 or 2
  std::uint64_t memory = 8ull << 30;       // SIMGPU_MEMORY: bytes of each device, "512MiB", "8GiB"
  std::uint64_t granularity = 2ull << 20;  // SIMGPU_GRANULARITY
  std::atomic<std::uint64_t> delay_ns{0};  // SIMGPU_DELAY: before each operation, "50us", "1ms"
  std::uint64_t seed = 0;                  // SIMGPU_SEED: 0 = the delay as it is; else 0 to 2 times it, and any order
                                           // of a graph's nodes that their dependencies admit
  std::string report;                      // SIMGPU_REPORT: the file that reports are appended to; empty = none
  // SIMGPU_FAULT, a list such as "init,create:3":
  bool fail_init = false;            // init       cuInit says that there is no device (100)
  bool refuse_host_pages = false;    // hostnuma   cuMemCreate refuses host pages, although the attribute promises them
  std::uint64_t fail_create_at = 0;  // create:N   the Nth cuMemCreate is out of memory
  std::uint64_t die_at = 0;          // sticky:N   the Nth operation that runs ends with error 700, which stays
};

// Throws std::invalid_argument with the setting that cannot be read.
void read_config(Config& config);

}  // namespace simgpu
