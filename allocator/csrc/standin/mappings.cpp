#include "mappings.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>

#include "results.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace ballonet::standin {

bool overlap(const std::vector<Run>& left, const std::vector<Run>& right) {
  for (const Run& a : left) {
    for (const Run& b : right) {
      if (a.store == b.store && a.offset < b.offset + b.size && b.offset < a.offset + a.size) return true;
    }
  }
  return false;
}

void Visible::show(std::uint64_t address, const Run& run) {
  bytes_ += run.size;
  const auto goes_on = [](const auto& left, std::uint64_t at, const Run& right) {
    const Run& run = left.second;
    return left.first + run.size == at && run.store == right.store && run.offset + run.size == right.offset;
  };
  auto here = runs_.upper_bound(address);
  if (here != runs_.begin() && goes_on(*std::prev(here), address, run)) {
    here = std::prev(here);
    here->second.size += run.size;
  } else {
    here = runs_.emplace_hint(here, address, run);
  }
  const auto next = std::next(here);
  if (next != runs_.end() && goes_on(*here, next->first, next->second)) {
    here->second.size += next->second.size;
    runs_.erase(next);
  }
}

void Visible::hide(std::uint64_t address, std::uint64_t size) {
  const std::uint64_t end = address + size;
  auto at = runs_.upper_bound(address);
  if (at != runs_.begin() && std::prev(at)->first + std::prev(at)->second.size > address) --at;
  while (at != runs_.end() && at->first < end) {
    const std::uint64_t start = at->first;
    const Run run = at->second;
    const std::uint64_t from = std::max(start, address);
    const std::uint64_t to = std::min(start + run.size, end);
    if (to < start + run.size) runs_[to] = Run{run.store, run.offset + (to - start), start + run.size - to};
    if (from > start) {
      at->second.size = from - start;
      ++at;
    } else {
      at = runs_.erase(at);
    }
    bytes_ -= to - from;
  }
}

std::uint64_t Visible::find(std::uint64_t address, std::uint64_t size, std::vector<Run>* found) const {
  const std::uint64_t end = address + size;
  auto at = runs_.upper_bound(address);
  if (at != runs_.begin()) --at;
  std::uint64_t reached = address;
  for (; reached < end; ++at) {
    if (at == runs_.end() || reached < at->first || reached >= at->first + at->second.size) break;
    const Run& run = at->second;
    const std::uint64_t skip = reached - at->first;
    const std::uint64_t bytes = std::min(end - reached, run.size - skip);
    found->push_back(Run{run.store, run.offset + skip, bytes});
    reached += bytes;
  }
  return reached;
}

namespace {

using ull = unsigned long long;

void* pointer(std::uint64_t address) { return reinterpret_cast<void*>(address); }

CUresult refuse_errno(const char* function, const char* call, int error) {
  if (error == ENOMEM) {
    return refuse(
        cuda::kOutOfMemory,
        "%s: %s failed with ENOMEM: the process has as many memory maps as vm.max_map_count allows, or no memory; "
        "use a larger page size or raise it (sysctl vm.max_map_count)",
        function, call);
  }
  return refuse(cuda::kOperatingSystem, "%s: %s failed: %s", function, call, std::strerror(error));
}

// Reserved, inaccessible memory over whatever is there.
bool cover(std::uint64_t address, std::uint64_t size) {
  return ::mmap(pointer(address), size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) !=
         MAP_FAILED;
}

bool read_all(int fd, std::uint64_t address, const Run& run) {
  for (std::uint64_t done = 0; done < run.size;) {
    const ssize_t got = ::pread(fd, pointer(address + done), run.size - done, static_cast<off_t>(run.offset + done));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return false;
    done += static_cast<std::uint64_t>(got);
  }
  return true;
}

}  // namespace

CUresult Mappings::open() {
  CUresult failed = extents(Store::kDevice).open("ballonet-device");
  if (failed == cuda::kSuccess) failed = extents(Store::kHost).open("ballonet-host");
  if (failed == cuda::kSuccess) failed = extents(Store::kPeer).open("ballonet-peer");
  if (failed == cuda::kSuccess) cushion_.fill(fd(Store::kHost));
  return failed;
}

CUresult Mappings::create(std::uint64_t size, Store store, std::uint64_t* handle) {
  const std::uint64_t id = next_handle_;
  Handle& made = handles_[id];
  made = Handle{store, 0, size, 0};
  const CUresult failed = extents(store).take(size, &made.offset);
  if (failed != cuda::kSuccess) {
    handles_.erase(id);
    return failed;
  }
  ++next_handle_;
  *handle = id;
  return cuda::kSuccess;
}

CUresult Mappings::release(std::uint64_t handle) {
  const auto found = handles_.find(handle);
  if (found == handles_.end()) {
    return refuse(cuda::kInvalidValue, "cuMemRelease: %#llx is no handle, or was released before", ull{handle});
  }
  const Handle& gone = found->second;
  if (gone.mapped > 0) {
    return refuse(cuda::kIllegalState, "cuMemRelease: handle %#llx is still mapped at %u address(es); unmap it first",
                  ull{handle}, gone.mapped);
  }
  const CUresult failed = extents(gone.store).give(gone.offset, gone.size);
  if (failed == cuda::kSuccess) handles_.erase(found);
  return failed;
}

CUresult Mappings::reserve(std::uint64_t size, std::uint64_t alignment, std::uint64_t hint, std::uint64_t* address) {
  const std::uint64_t slack = alignment > kGranularity ? alignment - kGranularity : 0;
  if (size > (1ull << 47) || slack > (1ull << 46)) {
    return refuse(cuda::kOutOfMemory, "cuMemAddressReserve: %llu bytes are more than there are addresses", ull{size});
  }
  void* got = ::mmap(pointer(hint), size + slack, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (got == MAP_FAILED) return refuse_errno("cuMemAddressReserve", "mmap", errno);
  const auto start = reinterpret_cast<std::uint64_t>(got);
  const std::uint64_t aligned = alignment > kGranularity ? (start + alignment - 1) & ~(alignment - 1) : start;
  if (aligned > start) ::munmap(got, aligned - start);
  if (aligned < start + slack) ::munmap(pointer(aligned + size), start + slack - aligned);
  reservations_[aligned] = size;
  *address = aligned;
  return cuda::kSuccess;
}

CUresult Mappings::free(std::uint64_t address, std::uint64_t size) {
  const auto found = reservations_.find(address);
  if (found == reservations_.end() || found->second != size) {
    return refuse(cuda::kInvalidValue,
                  "cuMemAddressFree: [%#llx, +%llu) is not exactly what one cuMemAddressReserve returned", ull{address},
                  ull{size});
  }
  const auto inside = mappings_.lower_bound(address);
  if (inside != mappings_.end() && inside->first < address + size) {
    return refuse(cuda::kIllegalState, "cuMemAddressFree: [%#llx, +%llu) still has a mapping at %#llx; unmap it first",
                  ull{address}, ull{size}, ull{inside->first});
  }
  if (::munmap(pointer(address), size) != 0) return refuse_errno("cuMemAddressFree", "munmap", errno);
  reservations_.erase(found);
  return cuda::kSuccess;
}

bool Mappings::reserved(std::uint64_t address, std::uint64_t size) const {
  auto next = reservations_.upper_bound(address);
  if (next == reservations_.begin()) return false;
  const auto& [start, bytes] = *std::prev(next);
  return address - start < bytes && size <= bytes - (address - start);
}

CUresult Mappings::map(std::uint64_t address, std::uint64_t size, std::uint64_t handle) {
  const auto found = handles_.find(handle);
  if (found == handles_.end()) return refuse(cuda::kInvalidValue, "cuMemMap: %#llx is no handle", ull{handle});
  Handle& backing = found->second;
  if (size != backing.size) {
    return refuse(cuda::kInvalidValue, "cuMemMap: size %llu is not the %llu bytes of the handle", ull{size},
                  ull{backing.size});
  }
  if (address % kGranularity != 0 || !reserved(address, size)) {
    return refuse(cuda::kInvalidValue, "cuMemMap: [%#llx, +%llu) does not lie in one reservation, page-aligned",
                  ull{address}, ull{size});
  }
  const auto next = mappings_.lower_bound(address);
  const bool hits_next = next != mappings_.end() && next->first < address + size;
  const bool hits_before = next != mappings_.begin() && std::prev(next)->first + std::prev(next)->second.size > address;
  if (hits_next || hits_before) {
    return refuse(cuda::kAlreadyMapped, "cuMemMap: [%#llx, +%llu) overlaps the mapping at %#llx; unmap it first",
                  ull{address}, ull{size}, ull{hits_before ? std::prev(next)->first : next->first});
  }
  const auto made = mappings_.emplace_hint(next, address, Mapping{size, handle, false, false});
  const int access = held_.count(address) > 0 ? PROT_READ | PROT_WRITE : PROT_NONE;
  if (::mmap(pointer(address), size, access, MAP_SHARED | MAP_FIXED, fd(backing.store),
             static_cast<off_t>(backing.offset)) == MAP_FAILED) {
    const int error = errno;
    mappings_.erase(made);
    cover(address, size);  // a kernel that failed late may have left a hole
    return refuse_errno("cuMemMap", "mmap", error);
  }
  ++backing.mapped;
  return cuda::kSuccess;
}

CUresult Mappings::whole(std::uint64_t address, std::uint64_t size, const char* function) const {
  auto at = mappings_.find(address);
  if (at == mappings_.end()) return refuse(cuda::kNotMapped, "%s: no mapping starts at %#llx", function, ull{address});
  std::uint64_t covered = 0;
  for (; covered < size && at != mappings_.end() && at->first == address + covered; ++at) covered += at->second.size;
  if (covered == size) return cuda::kSuccess;
  return refuse(cuda::kInvalidValue,
                "%s: [%#llx, +%llu) must be whole mappings without a gap; those from there cover %llu", function,
                ull{address}, ull{size}, ull{covered});
}

CUresult Mappings::set_access(std::uint64_t address, std::uint64_t size, bool for_cpu) {
  const CUresult refused = whole(address, size, "cuMemSetAccess");
  if (refused != cuda::kSuccess) return refused;
  const auto first = mappings_.find(address);
  const auto last = mappings_.lower_bound(address + size);
  const auto on_host = [&](const auto& mapping) { return handles_.at(mapping.second.handle).store == Store::kHost; };
  if (for_cpu && !std::all_of(first, last, on_host)) {
    return refuse(cuda::kInvalidValue, "cuMemSetAccess: memory of the device cannot be opened for the CPU");
  }
  if (::mprotect(pointer(address), size, PROT_READ | PROT_WRITE) != 0) {
    const int error = errno;
    for (auto at = first; at != last; ++at) {  // mprotect may have changed some of them
      if (!at->second.accessible) ::mprotect(pointer(at->first), at->second.size, PROT_NONE);
    }
    return refuse_errno("cuMemSetAccess", "mprotect", error);
  }
  if (extents(handles_.at(first->second.handle).store).backed()) {
    ::madvise(pointer(address), size,
              MADV_POPULATE_WRITE);  // only a saving: pages are committed, a touch would map them too
  }
  for (auto at = first; at != last; ++at) {
    at->second.for_cpu |= for_cpu;
    if (at->second.accessible) continue;
    const Handle& backing = handles_.at(at->second.handle);
    visible_.show(at->first, Run{backing.store, backing.offset, backing.size});
    at->second.accessible = true;
  }
  return cuda::kSuccess;
}

void Mappings::let_go(std::uint64_t address, std::uint64_t size) {
  if (held_.erase(address) > 0 && mappings_.count(address) == 0) cover(address, size);
}

CUresult Mappings::fillable(std::uint64_t address, std::uint64_t size, const std::vector<Run>& runs,
                            const char* function) const {
  std::uint64_t start = 0, whole = 0;
  const bool one = !mapping_at(address, &start, &whole) || address + size <= start + whole;
  for (const Run& run : runs) {
    if (!one && run.store == Store::kHost)
      return refuse(cuda::kInvalidValue, "%s: [%#llx, +%llu) spans several pages of the host", function,
                    static_cast<unsigned long long>(address), static_cast<unsigned long long>(size));
  }
  return cuda::kSuccess;
}

bool Mappings::mapping_at(std::uint64_t address, std::uint64_t* start, std::uint64_t* size) const {
  const auto next = mappings_.upper_bound(address);
  if (next == mappings_.begin() || address >= std::prev(next)->first + std::prev(next)->second.size) return false;
  *start = std::prev(next)->first;
  *size = std::prev(next)->second.size;
  return true;
}

bool Mappings::open_for_cpu(std::uint64_t address, std::uint64_t size) const {
  auto first = mappings_.upper_bound(address);
  if (first != mappings_.begin() && std::prev(first)->first + std::prev(first)->second.size > address) --first;
  const auto last = mappings_.lower_bound(address + size);
  return std::all_of(first, last, [&](const auto& mapping) {
    return mapping.second.for_cpu || on_device(handles_.at(mapping.second.handle).store);
  });
}

CUresult Mappings::unmap(std::uint64_t address, std::uint64_t size) {
  const CUresult refused = whole(address, size, "cuMemUnmap");
  if (refused != cuda::kSuccess) return refused;
  const bool held = held_.count(address) > 0 && mappings_.at(address).size == size;
  bool covered = held || cover(address, size);
  if (!covered && errno == ENOMEM && cushion_.release_maps()) covered = cover(address, size);
  // Where another thread took the cushion's maps, the memory stays mapped without access: no hole, and it can be
  // punched out.
  if (!covered && ::mprotect(pointer(address), size, PROT_NONE) != 0) return refuse_errno("cuMemUnmap", "mmap", errno);
  cushion_.fill(fd(Store::kHost));
  visible_.hide(address, size);
  const auto last = mappings_.lower_bound(address + size);
  for (auto at = mappings_.find(address); at != last; at = mappings_.erase(at)) --handles_.at(at->second.handle).mapped;
  return cuda::kSuccess;
}

CUresult Mappings::locate(std::uint64_t address, std::uint64_t size, CUresult code, const char* function,
                          std::vector<Run>* runs) const {
  runs->clear();
  if (size > ~address)
    return refuse(cuda::kInvalidValue, "%s: [%#llx, +%llu) wraps around", function, ull{address}, ull{size});
  const std::uint64_t end = address + size;
  auto reservation = reservations_.upper_bound(address);
  if (reservation != reservations_.begin() &&
      std::prev(reservation)->first + std::prev(reservation)->second > address) {
    --reservation;
  }
  if (reservation == reservations_.end() || reservation->first >= end) {
    runs->push_back(Run{Store::kPlain, address, size});
    return cuda::kSuccess;
  }
  const std::uint64_t missing = visible_.find(address, size, runs);
  if (missing == end) return cuda::kSuccess;
  return refuse(code, "%s: [%#llx, +%llu) has no accessible mapping at %#llx (not mapped, or no cuMemSetAccess)",
                function, ull{address}, ull{size}, ull{missing});
}

template <class Visitor>
bool Mappings::visit_needed(std::uint64_t address, const Run& run, Visitor visit) const {
  const std::uint64_t end = address + run.size;
  std::uint64_t at = address;
  auto next = idle_.upper_bound(address);
  if (next != idle_.begin() && std::prev(next)->first + std::prev(next)->second > address) --next;
  for (; at < end; ++next) {
    const bool last = next == idle_.end() || next->first >= end;
    const std::uint64_t until = last ? end : std::max(at, next->first);
    if (until > at && !visit(at, Run{run.store, run.offset + (at - address), until - at})) return false;
    if (last) break;
    at = next->first + next->second;
  }
  return true;
}

std::uint64_t Mappings::private_bytes() const {
  std::uint64_t bytes = 0;
  for (const auto& [address, run] : visible_.runs()) {
    visit_needed(address, run, [&](std::uint64_t, const Run& part) { return bytes += part.size, true; });
  }
  return bytes;
}

void Mappings::privatize(bool copy) {
  for (const auto& [address, mapping] : mappings_) {
    if (!mapping.accessible && !cover(address, mapping.size)) ::munmap(pointer(address), mapping.size);
  }
  for (const auto& [address, run] : visible_.runs()) {
    const int access = copy ? PROT_READ | PROT_WRITE : PROT_NONE;
    constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
    if (::mmap(pointer(address), run.size, access, kFlags, -1, 0) == MAP_FAILED) {
      ::munmap(pointer(address), run.size);  // a fault in the child is better than writing into its parent's memory
      continue;
    }
    const int from = fd(run.store);
    const auto read = [from](std::uint64_t at, const Run& part) { return read_all(from, at, part); };
    if (copy && !visit_needed(address, run, read)) ::mprotect(pointer(address), run.size, PROT_NONE);
  }
  cushion_.release_maps();
  for (Extents& store : stores_) store.forget_fd();
}

}  // namespace ballonet::standin
