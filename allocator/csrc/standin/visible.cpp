#include "visible.h"

#include <algorithm>
#include <iterator>

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

}  // namespace ballonet::standin
