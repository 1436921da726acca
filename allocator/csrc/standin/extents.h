// Physical memory of the stand-in: extents of one memfd.
//
// An extent is committed when it is made and punched out when it is freed, so that the blocks of the memfd are at every
// moment the bytes that exist, and running out of memory shows as an error here and never as a signal later. Where
// nobody reads or writes pages it may be left out: then an extent is a piece of a sparse file.
//
// Lock: the stand-in's (state.h), held by the caller.
#pragma once

#include <cstdint>
#include <map>

#include "driver/driver_abi.h"

namespace ballonet::standin {

// Memory that this machine, or the control group of the process, can still give.
//
// Committing more than that calls the kernel's out-of-memory killer instead of failing, so everything is asked here
// first. Allocates nothing and takes no lock: safe in the child of a fork.

std::uint64_t ram_total();      // bytes of RAM
std::uint64_t ram_available();  // bytes that can be committed now without swapping or being killed
std::uint64_t ram_margin();     // bytes that must stay available for everyone else

// A few memory maps of the process held back, so that memory can be given back when vm.max_map_count is reached.
//
// Note [Why]. Unmapping a page replaces one map of the kernel by another and usually ends with fewer, but the kernel
// refuses every mmap once the limit is reached. Freeing the cushion makes the room that the call needs for a moment.
//
// Lock: the stand-in's (state.h), held by the caller.

class Cushion {
 public:
  void fill(int fd);    // no effect where it is full, or where the kernel refuses
  bool release_maps();  // frees its maps for the next call that needs some; false where it was empty

 private:
  std::uint64_t address_ = 0;  // 0 = empty
};

class Extents {
 public:
  CUresult open(const char* name);
  // Are extents that are taken from now on committed?
  void back(bool backed) { backed_ = backed; }
  bool backed() const { return backed_; }
  // Takes the lowest free offset at which `size` bytes fit, which keeps neighbours contiguous.
  CUresult take(std::uint64_t size, std::uint64_t* offset);
  CUresult give(std::uint64_t offset, std::uint64_t size);
  int fd() const { return fd_; }
  std::uint64_t taken() const { return taken_; }  // bytes that exist
  void forget_fd();                               // in the child of a fork

 private:
  bool admits(std::uint64_t size);
  CUresult commit(std::uint64_t offset, std::uint64_t size);
  CUresult extend(std::uint64_t end);
  void free_range(std::uint64_t offset, std::uint64_t size);

  int fd_ = -1;
  bool backed_ = true;
  std::uint64_t taken_ = 0;
  std::uint64_t extended_ = 0;                                       // bytes of the file that were made without memory
  std::map<std::uint64_t, std::uint64_t> free_ = {{0, 1ull << 62}};  // offset -> bytes; the file has room for all RAM
  std::uint64_t admitted_ = 0;  // bytes that may be taken before the machine is asked again
  std::uint64_t asked_at_ = 0;  // CLOCK_MONOTONIC, ns
};

}  // namespace ballonet::standin
