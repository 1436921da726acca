// Which addresses changed, when and by whom: what an operation is checked against when it runs.
//
// Every map, unmap and free takes the next serial. An operation keeps the serial of the moment at which it was queued;
// when it runs, a range of it that changed since, or that has no accessible memory, is a violation: on a GPU the
// operation would have met other bytes, or none.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "memory.h"
#include "registered.h"

namespace simgpu {

struct Trace {  // where the host was
  void* frames[24];
  int depth = 0;
  void take();
  std::string text() const;
};

struct Range {
  std::uint64_t address, size;
  bool write;
};

struct Allocation {
  std::uint64_t size, handle;  // handle 0: host memory
  int device;
};

class Watch {
 public:
  void changed(std::uint64_t address, std::uint64_t size, const char* what);
  std::uint64_t serial() const { return serial_; }

  std::map<std::uint64_t, Allocation> pinned;  // made by cuMemHostAlloc, by address
  ballonet::standin::Registered registered;

  // What is wrong with these ranges for an operation that was queued at `serial`; empty where nothing is.
  std::string violation(const ballonet::standin::Mappings& mappings, const std::vector<Range>& ranges,
                        std::uint64_t serial) const;
  // Host memory that is pinned or registered as a whole?
  bool is_pinned(std::uint64_t address, std::uint64_t size) const;

 private:
  struct Change {
    std::uint64_t end, serial;
    const char* what;
    Trace trace;
  };
  const Change* newest_change(const Range& range) const;

  std::uint64_t serial_ = 0;
  std::map<std::uint64_t, Change> changes_;  // by address, disjoint
};

}  // namespace simgpu
