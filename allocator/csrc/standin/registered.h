// Plain memory of the process that was registered with the device, and how it is read.
//
// Note [No fault]. CUDA pins the pages of registered memory, so that a file that is mapped there may become shorter
// under a copy: the copy brings the old bytes. Here nothing can pin a page of a file, and a process that touches one
// that is gone is killed by SIGBUS. So the copy engine has the kernel read registered memory on its behalf, which says
// EFAULT where a page is gone. Such a copy fails, see engine.h. CUDA would be silent: code that copies from a mapped
// file has to look at the file itself.
//
// Stricter than CUDA: two ranges must not share a page of the machine; a copy lies wholly in one range, or outside of
// all; a range cannot be unregistered while a copy that was submitted still reads it, as nothing says that
// cuMemHostUnregister waits; and memory that the process may only read has to be registered as such.
//
// Lock: the stand-in's (state.h), held by the caller; functions with a lock argument let go of it while they wait.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <mutex>

#include "mappings.h"

namespace ballonet::standin {

class Registered {
 public:
  // Pages are touched, as pinning would. The lock is released meanwhile.
  CUresult add(std::unique_lock<std::mutex>& lock, const Mappings& mappings, std::uint64_t address, std::uint64_t size,
               unsigned flags);
  // Refused while the memory is in use.
  CUresult remove(std::uint64_t address, const std::function<bool(const Run&)>& in_use);
  void clear() { ranges_.clear(); }
  // May a copy read, or write, this plain memory? `inside`: it is registered.
  CUresult may_copy(const char* function, std::uint64_t address, std::uint64_t size, bool write, bool* inside) const;

 private:
  struct Range {
    std::uint64_t size;
    bool read_only;
  };
  using Ranges = std::map<std::uint64_t, Range>;  // by address

  Ranges::const_iterator touching(std::uint64_t from, std::uint64_t to) const;

  Ranges ranges_;
};

// Copies from memory that may be gone. False where it was; what had been read before is in the destination.
bool read_guarded(char* to, const char* from, std::uint64_t size);

}  // namespace ballonet::standin
