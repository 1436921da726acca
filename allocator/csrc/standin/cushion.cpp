#include "cushion.h"

#include <sys/mman.h>

namespace ballonet::standin {
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

}  // namespace ballonet::standin
