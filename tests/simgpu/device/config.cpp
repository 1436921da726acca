#include "config.h"

#include <cstdlib>
#include <sstream>
#include <stdexcept>
#include <utility>

namespace simgpu {
namespace {

using Units = std::initializer_list<std::pair<const char*, std::uint64_t>>;

// "50us" with the units {{"us", 1000}, ...}; a number without a unit counts as it is.
std::uint64_t amount(const char* name, const std::string& text, Units units) {
  std::size_t used = 0;
  const double number = text.empty() || text[0] < '0' || text[0] > '9' ? -1 : std::stod(text, &used);
  if (number >= 0) {
    const std::string rest = text.substr(used);
    if (rest.empty()) return static_cast<std::uint64_t>(number);
    for (const auto& [unit, factor] : units) {
      if (rest == unit) return static_cast<std::uint64_t>(number * static_cast<double>(factor));
    }
  }
  throw std::invalid_argument(std::string(name) + "=" + text + " cannot be read");
}

void read_fault(Config& config, const std::string& fault) {
  const std::size_t colon = fault.find(':');
  const std::string kind = fault.substr(0, colon);
  const std::uint64_t at = colon == std::string::npos ? 0 : amount("SIMGPU_FAULT", fault.substr(colon + 1), {});
  if (kind == "init")
    config.fail_init = true;
  else if (kind == "hostnuma")
    config.refuse_host_pages = true;
  else if (kind == "create" && at > 0)
    config.fail_create_at = at;
  else if (kind == "sticky" && at > 0)
    config.die_at = at;
  else
    throw std::invalid_argument("SIMGPU_FAULT=" + fault + " is none of init, hostnuma, create:N, sticky:N");
}

}  // namespace

void read_config(Config& config) {
  const auto read = [](const char* name, std::uint64_t otherwise, Units units) {
    const char* text = std::getenv(name);
    return text == nullptr || *text == '\0' ? otherwise : amount(name, text, units);
  };
  const Units bytes = {{"KiB", 1ull << 10}, {"MiB", 1ull << 20}, {"GiB", 1ull << 30}};
  const Units times = {{"ns", 1}, {"us", 1000}, {"ms", 1'000'000}, {"s", 1'000'000'000}};
  config.devices = static_cast<int>(read("SIMGPU_DEVICES", 2, {}));
  if (config.devices < 1 || config.devices > 2) throw std::invalid_argument("SIMGPU_DEVICES is neither 1 nor 2");
  config.memory = read("SIMGPU_MEMORY", config.memory, bytes);
  config.granularity = read("SIMGPU_GRANULARITY", config.granularity, bytes);
  config.delay_ns = read("SIMGPU_DELAY", 0, times);
  config.seed = read("SIMGPU_SEED", 0, {});
  if (const char* path = std::getenv("SIMGPU_REPORT")) config.report = path;
  if (const char* faults = std::getenv("SIMGPU_FAULT")) {
    std::stringstream list(faults);
    for (std::string fault; std::getline(list, fault, ',');) read_fault(config, fault);
  }
}

}  // namespace simgpu
