#include "heap/heap_report.h"

namespace ballonet {

namespace {

// The words of torch's own error, by which programs recognise it: accelerate looks for " out of memory.".
std::string out_of_memory(Mapper& mapper, std::size_t asked) {
  constexpr unsigned kGiB = 3;
  const std::string tried = in_units(asked, kGiB);
  if (mapper.space.driver.is_standin()) return format("CPU out of memory. Tried to allocate %s.", tried.c_str());
  std::string room;
  try {
    const auto [free, total] = mapper.free_memory();
    room = format(" GPU %d has a total capacity of %s of which %s is free.", mapper.space.context.ordinal,
                  in_units(total, kGiB).c_str(), in_units(free, kGiB).c_str());
  } catch (const DriverError&) {
    // The driver cannot say it now; the error is raised without.
  }
  return format("%s out of memory. Tried to allocate %s.%s", cuda::kPlatform, tried.c_str(), room.c_str());
}

}  // namespace

std::string exhausted(Mapper& mapper, const HeapUsage& usage, std::size_t asked, const std::string& reason,
                      std::size_t missing) {
  const auto pages = mapper.numbers();
  const std::size_t page = mapper.space.page_size;
  const std::size_t enough = (pages.budget + missing) * page;
  const std::string larger = missing ? format("to %s (ballonet.set_budget(%zu)", in_units(enough).c_str(), enough)
                                     : std::string("(ballonet.set_budget");
  const auto bytes = [&](Owner owner) { return in_units(pages.pages[static_cast<std::size_t>(owner)] * page); };
  return format(
      "%s ballonet: budget %s in pages of %s: weights %s, activations %s (of which %s in live "
      "tensors), KV cache %s, retiring %s, free %s, not created %s; spilled to the host %s. %s. To go on: raise the "
      "budget %s, or BALLONET_BUDGET), use a smaller batch or a shorter context, or drop tensors and "
      "caches that are no longer needed",
      out_of_memory(mapper, asked).c_str(), in_units(pages.budget * page).c_str(), in_units(page).c_str(),
      bytes(Owner::kWeights).c_str(), bytes(Owner::kActivations).c_str(), in_units(usage.live_bytes()).c_str(),
      bytes(Owner::kKv).c_str(), bytes(Owner::kRetiring).c_str(), bytes(Owner::kFree).c_str(),
      in_units(pages.budget > pages.created ? (pages.budget - pages.created) * page : 0).c_str(),
      in_units(pages.spilled * page).c_str(), reason.c_str(), larger.c_str());
}

// Host pages of the heap go as soon as nothing lies on them, so there is nothing to trim for them.
std::string host_exhausted(Mapper& mapper, std::size_t pages, const std::string& reason) {
  const auto numbers = mapper.numbers();
  const std::size_t page = mapper.space.page_size;
  const std::string asked = in_units(pages * page);
  if (!mapper.space.context.host_pages)
    return format("ballonet: tried to map %s of host memory: %s", asked.c_str(), reason.c_str());
  return format(
      "ballonet: tried to map %s of host memory. Host budget %s in pages of %s, of which %s exist. %s. To go on: give "
      "a larger host budget (ballonet.install(host_budget=...), or BALLONET_HOST_BUDGET), or drop models and caches "
      "that have pages there",
      asked.c_str(), in_units(numbers.host_budget * page).c_str(), in_units(page).c_str(),
      in_units(numbers.host_created * page).c_str(), reason.c_str());
}

}  // namespace ballonet
