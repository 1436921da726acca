// Which addresses of weights and KV have device pages of their own: for torch's memory snapshot.
#include "mapper.h"

namespace ballonet {

std::vector<std::pair<CUdeviceptr, std::size_t>> Mapper::pages_of_ranges() {
  std::lock_guard<std::mutex> lock(mutex);
  std::vector<std::pair<CUdeviceptr, std::size_t>> runs;
  for (const Range* range : ranges_) {
    if (range->closed_ || range->owner == Owner::kActivations) continue;
    bool open = false;
    for (std::size_t i = 0; i < range->held_.table.size() && i < range->pieces; ++i) {
      const bool ours = range->held_.table[i].backing == Backing::kDevice;
      if (ours && !open) runs.emplace_back(address(*range, i), 0);
      if (ours) runs.back().second += page_size;
      open = ours;
    }
  }
  return runs;
}

}  // namespace ballonet
