// A few memory maps of the process held back, so that memory can be given back when vm.max_map_count is reached.
//
// Note [Why]. Unmapping a page replaces one map of the kernel by another and usually ends with fewer, but the kernel
// refuses every mmap once the limit is reached. Freeing the cushion makes the room that the call needs for a moment.
//
// Lock: the stand-in's (state.h), held by the caller.
#pragma once

#include <cstdint>

namespace ballonet::standin {

class Cushion {
 public:
  void fill(int fd);    // no effect where it is full, or where the kernel refuses
  bool release_maps();  // frees its maps for the next call that needs some; false where it was empty

 private:
  std::uint64_t address_ = 0;  // 0 = empty
};

}  // namespace ballonet::standin
