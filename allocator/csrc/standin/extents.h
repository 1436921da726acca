// Physical memory of the stand-in: extents of one memfd.
//
// An extent is committed when it is made and punched out when it is freed, so that the blocks of the memfd are at every
// moment the bytes that exist, and running out of memory shows as an error here and never as a signal later.
//
// Lock: the stand-in's (state.h), held by the caller.
#pragma once

#include <cstdint>
#include <map>

#include "driver/driver_abi.h"

namespace ballonet::standin {

class Extents {
 public:
  CUresult open(const char* name);
  // Takes the lowest free offset at which `size` bytes fit, which keeps neighbours contiguous.
  CUresult take(std::uint64_t size, std::uint64_t* offset);
  CUresult give(std::uint64_t offset, std::uint64_t size);
  int fd() const { return fd_; }
  std::uint64_t taken() const { return taken_; }  // bytes that exist
  void forget_fd();                               // in the child of a fork

 private:
  bool admits(std::uint64_t size);
  void free_range(std::uint64_t offset, std::uint64_t size);

  int fd_ = -1;
  std::uint64_t taken_ = 0;
  std::map<std::uint64_t, std::uint64_t> free_ = {{0, 1ull << 62}};  // offset -> bytes; the file has room for all RAM
  std::uint64_t admitted_ = 0;  // bytes that may be taken before the machine is asked again
  std::uint64_t asked_at_ = 0;  // CLOCK_MONOTONIC, ns
};

}  // namespace ballonet::standin
