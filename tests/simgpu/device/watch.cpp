#include "watch.h"

#include <execinfo.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>

namespace simgpu {
namespace {

using ballonet::standin::Run;
using ballonet::standin::Store;

std::string describe(const Range& range) {
  char text[96];
  std::snprintf(text, sizeof text, "%s [%#llx, +%llu)", range.write ? "writes" : "reads",
                static_cast<unsigned long long>(range.address), static_cast<unsigned long long>(range.size));
  return text;
}

}  // namespace

void Trace::take() { depth = ::backtrace(frames, sizeof frames / sizeof *frames); }

std::string Trace::text() const {
  const std::unique_ptr<char*, decltype(&std::free)> names(::backtrace_symbols(frames, depth), &std::free);
  std::string text;
  for (int i = 0; names && i < depth; ++i) {
    const std::string name = names.get()[i];  // the interpreter's own frames tell nothing, nor do those of this library
    if (name.find("libcuda.so.1(+") != name.npos || name.find("libpython") != name.npos) continue;
    text += "    " + name + "\n";
  }
  return text;
}

void Watch::changed(std::uint64_t address, std::uint64_t size, const char* what) {
  const std::uint64_t end = address + size;
  auto at = changes_.upper_bound(address);
  if (at != changes_.begin() && std::prev(at)->second.end > address) --at;
  while (at != changes_.end() && at->first < end) {
    const std::uint64_t start = at->first;
    Change change = at->second;
    at = changes_.erase(at);
    if (change.end > end) at = changes_.emplace(end, change).first;
    if (start < address) {
      change.end = address;
      changes_.emplace(start, change);
    }
  }
  Change& change = changes_[address];
  change.end = end;
  change.serial = ++serial_;
  change.what = what;
  change.trace.take();
}

const Watch::Change* Watch::newest_change(const Range& range) const {
  const Change* newest = nullptr;
  auto at = changes_.upper_bound(range.address);
  if (at != changes_.begin() && std::prev(at)->second.end > range.address) --at;
  for (; at != changes_.end() && at->first < range.address + range.size; ++at) {
    if (newest == nullptr || at->second.serial > newest->serial) newest = &at->second;
  }
  return newest;
}

bool Watch::is_pinned(std::uint64_t address, std::uint64_t size) const {
  auto at = pinned.upper_bound(address);
  if (at != pinned.begin() && address + size <= std::prev(at)->first + std::prev(at)->second.size) return true;
  bool inside = false;
  return registered.may_copy("", address, size, false, &inside) == ballonet::cuda::kSuccess && inside;
}

std::string Watch::violation(const ballonet::standin::Mappings& mappings, const std::vector<Range>& ranges,
                             std::uint64_t serial) const {
  for (const Range& range : ranges) {
    if (range.size == 0) continue;
    const Change* change = newest_change(range);
    if (change != nullptr && change->serial > serial) {
      return describe(range) + ", which was " + change->what + " since it was queued, at\n" + change->trace.text();
    }
    std::vector<Run> runs;
    const bool visible = mappings.locate(range.address, range.size, 1, "", &runs) == ballonet::cuda::kSuccess;
    if (visible && (runs.front().store != Store::kPlain || is_pinned(range.address, range.size))) continue;
    std::string text = describe(range) + ", where there is no memory that a device may use\n";
    if (change != nullptr) text += std::string("  last ") + change->what + " at\n" + change->trace.text();
    return text;
  }
  return "";
}

}  // namespace simgpu
