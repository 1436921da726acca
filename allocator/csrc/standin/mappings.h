// Handles, reserved addresses and what is mapped where.
//
// Note [Never a hole]. A reservation is PROT_NONE memory, and unmapping puts PROT_NONE memory back in one
// mmap(MAP_FIXED). An address that munmap() had freed could be given away by the next mmap() of any library, and the
// next cuMemMap would destroy what lies there.
//
// Note [Held]. Threads of a CPU are ordered by no stream: one may read an address at any moment, also while its page is
// exchanged. So a mapping that is held stays readable until mmap(MAP_FIXED) puts the next one in its place, in one
// step. To the driver's calls it is unmapped meanwhile, as any other.
//
// Lock: the stand-in's (state.h), held by the caller.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <unordered_map>
#include <vector>

#include "driver/driver_abi.h"
#include "extents.h"

namespace ballonet::standin {

// Which addresses may be used, and what bytes are behind them.
//
// Words
//   store    where bytes are: the memfd of the device, of the host, of the peer, or plain memory of the process
//   run      bytes that are contiguous in one store
//   visible  address that may be used: mapped, and given access
//
// Neighbours that go on in address, store and offset are one run, so that a large range is found in one step.
//
// Lock: the stand-in's (state.h), held by the caller.

enum class Store { kDevice, kHost, kPeer, kPlain };
constexpr int kStores = 3;  // that have a memfd

constexpr bool on_device(Store store) { return store == Store::kDevice || store == Store::kPeer; }

struct Run {
  Store store;
  std::uint64_t offset;  // in the memfd; for plain memory the address
  std::uint64_t size;
};

bool overlap(const std::vector<Run>& left, const std::vector<Run>& right);

class Visible {
 public:
  void show(std::uint64_t address, const Run& run);  // must be hidden
  void hide(std::uint64_t address, std::uint64_t size);
  // Appends the runs behind [address, address + size), in order; returns the first address that is not visible, or the
  // end.
  std::uint64_t find(std::uint64_t address, std::uint64_t size, std::vector<Run>* found) const;
  const std::map<std::uint64_t, Run>& runs() const { return runs_; }  // by address
  std::uint64_t bytes() const { return bytes_; }

 private:
  std::map<std::uint64_t, Run> runs_;
  std::uint64_t bytes_ = 0;
};

constexpr std::uint64_t kGranularity = 4096;

class Mappings {
 public:
  CUresult open();
  // Do pages of a store that are created from now on take memory at once?
  void back(Store store, bool backed) { extents(store).back(backed); }
  CUresult create(std::uint64_t size, Store store, std::uint64_t* handle);
  CUresult release(std::uint64_t handle);
  CUresult reserve(std::uint64_t size, std::uint64_t alignment, std::uint64_t hint, std::uint64_t* address);
  CUresult free(std::uint64_t address, std::uint64_t size);
  CUresult map(std::uint64_t address, std::uint64_t size, std::uint64_t handle);
  // `for_cpu`: too, which only host memory can be.
  CUresult set_access(std::uint64_t address, std::uint64_t size, bool for_cpu);
  CUresult unmap(std::uint64_t address, std::uint64_t size);

  // Until it is let go of, what is mapped at `address` can be read after `unmap`, for as long as nothing else is there.
  void hold(std::uint64_t address) { held_.insert(address); }
  void let_go(std::uint64_t address, std::uint64_t size);

  // Success where [address, address + size) is exactly one or more whole mappings that touch each other.
  CUresult whole(std::uint64_t address, std::uint64_t size, const char* function) const;
  // The runs behind an address range, in order. Refused with `code` unless all of it is visible or none of it reserved.
  CUresult locate(std::uint64_t address, std::uint64_t size, CUresult code, const char* function,
                  std::vector<Run>* runs) const;

  // May [address, address + size), which is mapped, be filled by one call? An H200's driver refuses that across the
  // ends of host pages. kSuccess or kInvalidValue.
  CUresult fillable(std::uint64_t address, std::uint64_t size, const std::vector<Run>& runs,
                    const char* function) const;

  // The mapping that holds `address`; false where there is none.
  bool mapping_at(std::uint64_t address, std::uint64_t* start, std::uint64_t* size) const;

  // May the CPU use what host memory is mapped there?
  bool open_for_cpu(std::uint64_t address, std::uint64_t size) const;

  std::uint64_t bytes(Store store) const { return stores_[static_cast<int>(store)].taken(); }
  int fd(Store store) const { return stores_[static_cast<int>(store)].fd(); }

  // In the child of a fork: every mapped page becomes private to it, where `copy` a copy (zeros for what is idle),
  // inaccessible otherwise.
  void privatize(bool copy);
  // What that copies.
  std::uint64_t private_bytes() const;
  // Has the next fork leave these bytes uncopied, as far as they are visible.
  void idle(std::uint64_t address, std::uint64_t size) { idle_[address] = size; }
  void no_longer_idle() { idle_.clear(); }

 private:
  struct Handle {
    Store store;
    std::uint64_t offset, size;
    unsigned mapped;  // mappings of it
  };
  struct Mapping {
    std::uint64_t size, handle;
    bool accessible, for_cpu;
  };

  Extents& extents(Store store) { return stores_[static_cast<int>(store)]; }
  bool reserved(std::uint64_t address, std::uint64_t size) const;
  // Calls `visit(address, run)` for each part of a visible run that is not idle; ends where that says false.
  template <class Visitor>
  bool visit_needed(std::uint64_t address, const Run& run, Visitor visit) const;

  Extents stores_[kStores];
  Cushion cushion_;
  std::unordered_map<std::uint64_t, Handle> handles_;
  std::uint64_t next_handle_ = 1;                        // never reused: a stale handle is always refused
  std::map<std::uint64_t, std::uint64_t> reservations_;  // address -> bytes
  std::map<std::uint64_t, Mapping> mappings_;            // by address
  std::set<std::uint64_t> held_;                         // addresses
  Visible visible_;
  std::map<std::uint64_t, std::uint64_t> idle_;  // address -> bytes, of the next fork; none overlap
};

}  // namespace ballonet::standin
