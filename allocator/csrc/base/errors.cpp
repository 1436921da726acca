#include "base/errors.h"

#include <cstdarg>
#include <cstdio>
#include <utility>
#include <vector>

namespace ballonet {

DriverError::DriverError(std::string function_, int code_, std::string name_, std::string detail_)
    : std::runtime_error(function_ + " failed with " + name_ + " (" + std::to_string(code_) + ")" +
                         (detail_.empty() ? "" : ": " + detail_)),
      function(std::move(function_)),
      code(code_),
      name(std::move(name_)),
      detail(std::move(detail_)) {}

BudgetInUse::BudgetInUse(std::size_t immovable_, std::size_t budget_, double waited_)
    : std::runtime_error(format("%s cannot be given back, more than a budget of %s", in_units(immovable_).c_str(),
                                in_units(budget_).c_str())),
      immovable(immovable_),
      budget(budget_),
      waited(waited_) {}

std::string format(const char* pattern, ...) {
  va_list arguments;
  va_start(arguments, pattern);
  va_list again;
  va_copy(again, arguments);
  const int length = std::vsnprintf(nullptr, 0, pattern, arguments);
  va_end(arguments);
  std::vector<char> text(static_cast<std::size_t>(length < 0 ? 0 : length) + 1);
  std::vsnprintf(text.data(), text.size(), pattern, again);
  va_end(again);
  return text.data();
}

std::string in_units(unsigned long long bytes, unsigned largest) {
  static constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes);
  unsigned unit = 0;
  while (value >= 1024 && unit < largest) {
    value /= 1024;
    ++unit;
  }
  return unit == 0 ? format("%llu B", bytes) : format("%.2f %s", value, kUnits[unit]);
}

}  // namespace ballonet
