#include "device/replay.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <numeric>
#include <unordered_map>

namespace ballonet {
namespace {

struct Step {
  bool alloc;
  std::size_t place;  // of the block, among all of the trace
  std::size_t size;
  CUstream stream;
};

// Ids become places and the trace's streams real ones ahead of time, so that the clock sees the heap and not a table.
std::vector<Step> parse(std::string_view rows, Mapper& mapper, std::uint64_t& peak_live, std::size_t& places) {
  if (rows.size() % 32 != 0) throw UsageError("a packed trace has rows of 32 bytes");
  std::vector<Step> steps;
  std::unordered_map<std::uint64_t, Step> live;
  std::unordered_map<std::uint64_t, CUstream> streams{{0, nullptr}};
  std::uint64_t bytes = 0;
  for (std::size_t at = 0; at < rows.size(); at += 32) {
    std::uint64_t id, size, stream;
    std::memcpy(&id, rows.data() + at + 8, 8);
    std::memcpy(&size, rows.data() + at + 16, 8);
    std::memcpy(&stream, rows.data() + at + 24, 8);
    if (rows[at] == 1) {
      if (streams.count(stream) == 0) streams[stream] = mapper.fences.create_stream();
      const Step step{true, places++, size, streams[stream]};
      if (!live.emplace(id, step).second)
        throw UsageError(format("block %llu is allocated twice", static_cast<unsigned long long>(id)));
      steps.push_back(step);
      peak_live = std::max(peak_live, bytes += size);
    } else if (const auto found = live.find(id); found != live.end()) {
      steps.push_back({false, found->second.place, 0, nullptr});
      bytes -= found->second.size;
      live.erase(found);
    }
  }
  return steps;
}

// The most bytes that have existed since the last call.
std::uint64_t peak_since(Mapper& mapper) {
  const std::lock_guard lock(mapper.space.mutex);
  const std::uint64_t peak = mapper.space.device.book.created_peak() * mapper.space.page_size;
  mapper.space.device.book.reset_peak();
  return peak;
}

std::uint64_t all_driver_calls() {
  const auto calls = driver_calls();
  return std::accumulate(calls.begin(), calls.end(), std::uint64_t{0});
}

}  // namespace

Replayed replay(Device& device, std::string_view rows, std::size_t parts) {
  Replayed result{};
  std::size_t places = 0;
  const std::vector<Step> steps = parse(rows, *device.mapper, result.peak_live, places);
  std::vector<void*> blocks(places, nullptr);
  peak_since(*device.mapper);
  device.heap.reset_peaks();
  parts = std::min(std::max<std::size_t>(parts, 1), std::max<std::size_t>(steps.size(), 1));
  const std::uint64_t calls = all_driver_calls();
  const auto begin = std::chrono::steady_clock::now();
  const auto drop_all = [&] {
    for (void* block : blocks) {
      if (block != nullptr) device.heap.deallocate(block);
    }
  };
  try {
    for (std::size_t at = 0; at < steps.size(); ++at) {
      const Step& step = steps[at];
      if (at == steps.size() * (result.physical.size() + 1) / parts)
        result.physical.push_back(peak_since(*device.mapper));
      if (step.alloc) {
        blocks[step.place] = step.size == 0 ? nullptr : device.heap.allocate(step.size, step.stream);
      } else if (void*& block = blocks[step.place]; block != nullptr) {
        device.heap.deallocate(block);
        block = nullptr;
      }
    }
  } catch (...) {
    drop_all();
    throw;
  }
  const auto end = std::chrono::steady_clock::now();
  result.driver_calls = all_driver_calls() - calls;
  result.ops = steps.size();
  const double ns = std::chrono::duration<double, std::nano>(end - begin).count();
  result.ns_per_op = steps.empty() ? 0 : ns / static_cast<double>(steps.size());
  result.physical.push_back(peak_since(*device.mapper));
  result.peak_physical = *std::max_element(result.physical.begin(), result.physical.end());
  drop_all();
  return result;
}

}  // namespace ballonet
