#include "extents.h"

#include <fcntl.h>
#include <linux/falloc.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "results.h"

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U
#endif

namespace ballonet::standin {

namespace {

constexpr std::uint64_t kNoLimit = ~0ull;

// The start of a small file as a string; false where it cannot be read.
bool slurp(const char* path, char* text, std::size_t capacity) {
  const int fd = ::open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return false;
  std::size_t length = 0;
  for (;;) {
    const ssize_t got = ::read(fd, text + length, capacity - 1 - length);
    if (got <= 0) break;
    length += static_cast<std::size_t>(got);
  }
  ::close(fd);
  text[length] = '\0';
  return length > 0;
}

std::uint64_t number_in(const char* folder, const char* file) {
  char path[512], text[64];
  if (std::snprintf(path, sizeof path, "%s/%s", folder, file) >= static_cast<int>(sizeof path)) return kNoLimit;
  if (!slurp(path, text, sizeof text) || text[0] < '0' || text[0] > '9') return kNoLimit;  // "max"
  return std::strtoull(text, nullptr, 10);
}

// What one control group leaves; page cache that it can drop counts as free.
std::uint64_t group_leaves(const char* folder, const char* limit_file, const char* usage_file) {
  const std::uint64_t limit = number_in(folder, limit_file);
  const std::uint64_t usage = number_in(folder, usage_file);
  if (limit == kNoLimit || usage == kNoLimit) return kNoLimit;
  char path[512], text[4096];
  std::uint64_t droppable = 0;
  if (std::snprintf(path, sizeof path, "%s/memory.stat", folder) < static_cast<int>(sizeof path) &&
      slurp(path, text, sizeof text)) {
    if (const char* found = std::strstr(text, "\ninactive_file ")) {
      droppable = std::strtoull(found + std::strlen("\ninactive_file "), nullptr, 10);
    }
  }
  const std::uint64_t used = usage - std::min(droppable, usage);
  return limit - std::min(used, limit);
}

// The same of a group and of all groups it lies in. `path` is cut at its slashes.
std::uint64_t hierarchy_leaves(const char* mount, char* path, const char* limit_file, const char* usage_file) {
  std::uint64_t least = kNoLimit;
  for (;;) {
    char folder[400];
    if (std::snprintf(folder, sizeof folder, "%s%s", mount, path) < static_cast<int>(sizeof folder)) {
      least = std::min(least, group_leaves(folder, limit_file, usage_file));
    }
    char* slash = std::strrchr(path, '/');
    if (slash == nullptr) return least;
    *slash = '\0';
  }
}

std::uint64_t groups_leave() {
  char text[2048];
  if (!slurp("/proc/self/cgroup", text, sizeof text)) return kNoLimit;
  std::uint64_t least = kNoLimit;
  char* rest = nullptr;
  for (char* line = ::strtok_r(text, "\n", &rest); line != nullptr; line = ::strtok_r(nullptr, "\n", &rest)) {
    char* controllers = std::strchr(line, ':');
    char* path = controllers == nullptr ? nullptr : std::strchr(controllers + 1, ':');
    if (path == nullptr) continue;
    *path++ = '\0';
    if (std::strcmp(controllers + 1, "") == 0) {
      least = std::min(least, hierarchy_leaves("/sys/fs/cgroup", path, "memory.max", "memory.current"));
    } else if (std::strcmp(controllers + 1, "memory") == 0) {
      least = std::min(
          least, hierarchy_leaves("/sys/fs/cgroup/memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes"));
    }
  }
  return least;
}

}  // namespace

std::uint64_t ram_total() {
  return static_cast<std::uint64_t>(::sysconf(_SC_PHYS_PAGES)) * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
}

std::uint64_t ram_available() {
  char text[2048];
  std::uint64_t machine = kNoLimit;
  if (slurp("/proc/meminfo", text, sizeof text)) {
    if (const char* found = std::strstr(text, "MemAvailable:")) {
      machine = std::strtoull(found + std::strlen("MemAvailable:"), nullptr, 10) * 1024;
    }
  }
  return std::min(machine, groups_leave());
}

std::uint64_t ram_margin() { return std::max<std::uint64_t>(64ull << 20, ram_total() / 64); }

namespace {
constexpr std::uint64_t kPage = 4096;
constexpr std::uint64_t kMaps = 4;  // replacing the middle of a map takes up to three for a moment
}  // namespace

void Cushion::fill(int fd) {
  if (address_ != 0) return;
  void* start = ::mmap(nullptr, kMaps * kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (start == MAP_FAILED) return;
  address_ = reinterpret_cast<std::uint64_t>(start);
  for (std::uint64_t i = 0; i < kMaps; ++i) {  // every second page of the file: neighbours would become one map
    void* page = reinterpret_cast<void*>(address_ + i * kPage);
    if (::mmap(page, kPage, PROT_NONE, MAP_SHARED | MAP_FIXED, fd, static_cast<off_t>(2 * i * kPage)) == MAP_FAILED) {
      release_maps();
      return;
    }
  }
}

bool Cushion::release_maps() {
  if (address_ == 0) return false;
  ::munmap(reinterpret_cast<void*>(address_), kMaps * kPage);
  address_ = 0;
  return true;
}

namespace {

std::uint64_t monotonic_ns() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<std::uint64_t>(now.tv_sec) * 1'000'000'000ull + static_cast<std::uint64_t>(now.tv_nsec);
}

int fallocate_retrying(int fd, int mode, std::uint64_t offset, std::uint64_t size) {
  int failed;
  do {
    failed = ::fallocate(fd, mode, static_cast<off_t>(offset), static_cast<off_t>(size)) == 0 ? 0 : errno;
  } while (failed == EINTR);
  return failed;
}

}  // namespace

CUresult Extents::open(const char* name) {
  if (fd_ >= 0) return cuda::kSuccess;
  fd_ = ::memfd_create(name, MFD_CLOEXEC | MFD_NOEXEC_SEAL);
  if (fd_ < 0) fd_ = ::memfd_create(name, MFD_CLOEXEC);  // kernels before 6.3 do not know the seal
  if (fd_ < 0) return refuse(cuda::kOutOfMemory, "cuInit: memfd_create(%s) failed: %s", name, std::strerror(errno));
  return cuda::kSuccess;
}

// Asking costs tens of microseconds, so one answer serves for a while: for a sixteenth of what was there, and 20 ms.
bool Extents::admits(std::uint64_t size) {
  constexpr std::uint64_t kLifetimeNs = 20'000'000;
  const std::uint64_t now = monotonic_ns();
  if (size > admitted_ || now - asked_at_ > kLifetimeNs) {
    const std::uint64_t available = ram_available();
    const std::uint64_t margin = ram_margin();
    if (available < margin || available - margin < size) return false;
    asked_at_ = now;
    admitted_ = std::max(size, (available - margin) / 16);
  }
  admitted_ -= size;
  return true;
}

CUresult Extents::take(std::uint64_t size, std::uint64_t* offset) {
  if (backed_ && !admits(size)) {
    return refuse(cuda::kOutOfMemory, "cuMemCreate: this machine cannot spare %llu bytes of RAM (%llu available)",
                  static_cast<unsigned long long>(size), static_cast<unsigned long long>(ram_available()));
  }
  const auto hole =
      std::find_if(free_.begin(), free_.end(), [size](const auto& entry) { return entry.second >= size; });
  if (hole == free_.end()) return refuse(cuda::kOutOfMemory, "cuMemCreate: no offset is free");
  const std::uint64_t at = hole->first;
  const std::uint64_t left = hole->second - size;
  const CUresult failed = backed_ ? commit(at, size) : extend(at + size);
  if (failed != cuda::kSuccess) return failed;
  auto node = free_.extract(hole);  // moves the node: nothing is allocated that could fail
  if (left > 0) {
    node.key() = at + size;
    node.mapped() = left;
    free_.insert(std::move(node));
  }
  taken_ += size;
  *offset = at;
  return cuda::kSuccess;
}

CUresult Extents::commit(std::uint64_t offset, std::uint64_t size) {
  const int failed = fallocate_retrying(fd_, 0, offset, size);
  if (failed == 0) return cuda::kSuccess;
  fallocate_retrying(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset,
                     size);  // what was committed before it failed
  return refuse(cuda::kOutOfMemory, "cuMemCreate: fallocate of %llu bytes failed: %s",
                static_cast<unsigned long long>(size), std::strerror(failed));
}

// The file is only ever made longer: a write behind its end would be a signal.
CUresult Extents::extend(std::uint64_t end) {
  struct stat file{};
  if (end <= extended_) return cuda::kSuccess;
  if (::fstat(fd_, &file) != 0 ||
      (static_cast<std::uint64_t>(file.st_size) < end && ::ftruncate(fd_, static_cast<off_t>(end)) != 0)) {
    return refuse(cuda::kOutOfMemory, "cuMemCreate: a file of %llu bytes cannot be made: %s",
                  static_cast<unsigned long long>(end), std::strerror(errno));
  }
  extended_ = end;
  return cuda::kSuccess;
}

CUresult Extents::give(std::uint64_t offset, std::uint64_t size) {
  const int failed = fallocate_retrying(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, size);
  if (failed != 0) {
    return refuse(cuda::kOperatingSystem, "cuMemRelease: punching out %llu bytes failed: %s",
                  static_cast<unsigned long long>(size), std::strerror(failed));
  }
  free_range(offset, size);
  taken_ -= size;
  return cuda::kSuccess;
}

void Extents::free_range(std::uint64_t offset, std::uint64_t size) {
  auto after = free_.lower_bound(offset);
  if (after != free_.end() && offset + size == after->first) {
    size += after->second;
    after = free_.erase(after);
  }
  if (after != free_.begin()) {
    auto before = std::prev(after);
    if (before->first + before->second == offset) {
      before->second += size;
      return;
    }
  }
  free_.emplace_hint(after, offset, size);
}

void Extents::forget_fd() {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

}  // namespace ballonet::standin
