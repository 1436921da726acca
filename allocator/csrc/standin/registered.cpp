#include "registered.h"

#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <memory>
#include <vector>

#include "results.h"

namespace ballonet::standin {
namespace {

using ull = unsigned long long;

constexpr unsigned kFlags = 0xF;      // all that CUDA has
constexpr unsigned kIoMemory = 4;     // CU_MEMHOSTREGISTER_IOMEMORY
constexpr std::size_t kBatch = 1024;  // pieces that one process_vm_readv takes

std::uint64_t page_size() { return static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE)); }

std::uint64_t page_start(std::uint64_t address) { return address & ~(page_size() - 1); }

std::uint64_t page_end(std::uint64_t address) { return page_start(address + page_size() - 1); }

// The first address of [from, to) that the process may not read, or with `write` not write; `to` where there is none.
std::uint64_t not_allowed(std::uint64_t from, std::uint64_t to, bool write) {
  const auto close = [](std::FILE* file) { std::fclose(file); };
  const std::unique_ptr<std::FILE, decltype(close)> maps(std::fopen("/proc/self/maps", "re"), close);
  char line[512], access[5];
  while (maps && from < to && std::fgets(line, sizeof line, maps.get()) != nullptr) {
    ull begin = 0, end = 0;
    if (std::sscanf(line, "%llx-%llx %4s", &begin, &end, access) != 3 || end <= from) continue;
    if (begin > from || access[0] != 'r' || (write && access[1] != 'w')) return from;
    from = end;
  }
  return std::min(from, to);
}

// Reads a byte of every page. Success, or errno and the first page that cannot be read.
int touch(std::uint64_t from, std::uint64_t to, std::uint64_t* failed) {
  char bytes[kBatch];
  std::vector<iovec> pieces;
  for (std::uint64_t page = from; page < to; page += pieces.size() * page_size()) {
    pieces.clear();
    for (std::uint64_t next = page; next < to && pieces.size() < kBatch; next += page_size()) {
      pieces.push_back({reinterpret_cast<void*>(next), 1});
    }
    const iovec local{bytes, pieces.size()};
    const ssize_t got = ::process_vm_readv(::getpid(), &local, 1, pieces.data(), pieces.size(), 0);
    if (got == static_cast<ssize_t>(pieces.size())) continue;
    *failed = page + static_cast<std::uint64_t>(std::max<ssize_t>(got, 0)) * page_size();
    return got < 0 ? errno : EFAULT;
  }
  return 0;
}

}  // namespace

// The first range that shares a page with [from, to).
Registered::Ranges::const_iterator Registered::touching(std::uint64_t from, std::uint64_t to) const {
  auto at = ranges_.upper_bound(from);
  if (at != ranges_.begin() && page_end(std::prev(at)->first + std::prev(at)->second.size) > page_start(from)) --at;
  return at != ranges_.end() && page_start(at->first) < page_end(to) ? at : ranges_.end();
}

CUresult Registered::add(std::unique_lock<std::mutex>& lock, const Mappings& mappings, std::uint64_t address,
                         std::uint64_t size, unsigned flags) {
  const char* const function = "cuMemHostRegister";
  std::vector<Run> runs;
  const CUresult refused = mappings.locate(address, size, cuda::kInvalidValue, function, &runs);
  if (refused != cuda::kSuccess) return refused;
  if (runs.empty() || runs.front().store != Store::kPlain) {
    return refuse(cuda::kInvalidValue, "%s: %#llx is an address of the device", function, ull{address});
  }
  if ((flags & ~kFlags) != 0) return refuse(cuda::kInvalidValue, "%s: unknown flags %#x", function, flags);
  if ((flags & kIoMemory) != 0) return refuse(cuda::kNotSupported, "%s: there is no I/O memory here", function);
  if (address == 0 || size == 0 || size > ~address - page_size()) {
    return refuse(cuda::kInvalidValue, "%s: [%#llx, +%llu) is no memory", function, ull{address}, ull{size});
  }
  const std::uint64_t end = address + size;
  const auto other = touching(address, end);
  if (other != ranges_.end()) {
    return refuse(cuda::kAlreadyRegistered, "%s: [%#llx, %#llx) shares a page with [%#llx, +%llu)", function,
                  ull{address}, ull{end}, ull{other->first}, ull{other->second.size});
  }
  const bool read_only = (flags & cuda::kRegisterReadOnly) != 0;
  const std::uint64_t barred = not_allowed(address, end, !read_only);
  if (barred < end) {
    return refuse(cuda::kInvalidValue, "%s: the process may not %s %#llx", function,
                  read_only ? "read" : "write (register it as read-only)", ull{barred});
  }
  ranges_[address] = Range{size, read_only};
  lock.unlock();
  std::uint64_t failed = 0;
  const int error = touch(page_start(address), end, &failed);
  lock.lock();
  if (error == 0) return cuda::kSuccess;
  ranges_.erase(address);
  if (error == EFAULT) {
    return refuse(cuda::kInvalidValue, "%s: there is nothing behind %#llx; is the file that is mapped there shorter?",
                  function, ull{failed});
  }
  return refuse(cuda::kNotSupported, "%s: process_vm_readv: %s", function, std::strerror(error));
}

CUresult Registered::remove(std::uint64_t address, const std::function<bool(const Run&)>& in_use) {
  const auto found = ranges_.find(address);
  if (found == ranges_.end()) {
    return refuse(cuda::kNotRegistered, "cuMemHostUnregister: nothing was registered at %#llx", ull{address});
  }
  if (in_use(Run{Store::kPlain, address, found->second.size})) {
    return refuse(cuda::kIllegalState, "cuMemHostUnregister: a copy from [%#llx, +%llu) is not done; wait for it first",
                  ull{address}, ull{found->second.size});
  }
  ranges_.erase(found);
  return cuda::kSuccess;
}

CUresult Registered::may_copy(const char* function, std::uint64_t address, std::uint64_t size, bool write,
                              bool* inside) const {
  *inside = false;
  auto at = ranges_.upper_bound(address);
  if (at != ranges_.begin() && std::prev(at)->first + std::prev(at)->second.size > address) --at;
  if (at == ranges_.end() || at->first >= address + size) return cuda::kSuccess;
  const auto& [begin, range] = *at;
  if (address < begin || size > range.size - (address - begin)) {
    return refuse(cuda::kInvalidValue, "%s: [%#llx, +%llu) lies partly in the registered memory [%#llx, +%llu)",
                  function, ull{address}, ull{size}, ull{begin}, ull{range.size});
  }
  if (write && range.read_only) {
    return refuse(cuda::kInvalidValue, "%s: [%#llx, +%llu) was registered as read-only", function, ull{address},
                  ull{size});
  }
  *inside = true;
  return cuda::kSuccess;
}

bool read_guarded(char* to, const char* from, std::uint64_t size) {
  while (size > 0) {
    const iovec local{to, size}, remote{const_cast<char*>(from), size};
    const ssize_t got = ::process_vm_readv(::getpid(), &local, 1, &remote, 1, 0);
    if (got <= 0) return false;
    to += got;
    from += got;
    size -= static_cast<std::uint64_t>(got);
  }
  return true;
}

}  // namespace ballonet::standin
