#include "ram.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

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

}  // namespace ballonet::standin
