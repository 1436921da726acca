#include "extents.h"

#include <fcntl.h>
#include <linux/falloc.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "ram.h"
#include "refusal.h"

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U
#endif

namespace ballonet::standin {
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
  if (!admits(size)) {
    return refuse(cuda::kOutOfMemory, "cuMemCreate: this machine cannot spare %llu bytes of RAM (%llu available)",
                  static_cast<unsigned long long>(size), static_cast<unsigned long long>(ram_available()));
  }
  const auto hole =
      std::find_if(free_.begin(), free_.end(), [size](const auto& entry) { return entry.second >= size; });
  if (hole == free_.end()) return refuse(cuda::kOutOfMemory, "cuMemCreate: no offset is free");
  const std::uint64_t at = hole->first;
  const std::uint64_t left = hole->second - size;
  const int failed = fallocate_retrying(fd_, 0, at, size);
  if (failed != 0) {
    fallocate_retrying(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, at,
                       size);  // what was committed before it failed
    return refuse(cuda::kOutOfMemory, "cuMemCreate: fallocate of %llu bytes failed: %s",
                  static_cast<unsigned long long>(size), std::strerror(failed));
  }
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
