// The errors of the core. The bindings turn each of these into the class of the same name in
// `ballonet.allocator.errors`; the entry points turn them into a code and a message.
//
// Guarantees: an error holds copies of all that is shown of it.
//
// Lock: none.
#pragma once

#include <stdexcept>
#include <string>

namespace ballonet {

// The caller's arguments are invalid; nothing was changed.
struct UsageError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The driver's library cannot be loaded, or lacks a function or a feature that ballonet needs.
struct DriverUnavailable : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A driver call failed; what it was part of has been unwound.
struct DriverError : std::runtime_error {
  DriverError(std::string function_, int code_, std::string name_, std::string detail_);
  std::string function;
  int code;  // the driver's
  std::string name;
  std::string detail;
};

// No page could be had within the budget, or the driver has no memory left for one.
struct PoolExhausted : std::runtime_error {
  explicit PoolExhausted(const std::string& message, std::size_t wanted_ = 0, std::size_t missing_ = 0)
      : std::runtime_error(message), wanted(wanted_), missing(missing_) {}
  std::size_t wanted;   // pages that were asked of the pool
  std::size_t missing;  // pages that have to be given back before they can be had; 0 where that would not help
};

// A budget below what can be given back; the one before is in force again.
struct BudgetInUse : std::runtime_error {
  BudgetInUse(std::size_t immovable_, std::size_t budget_, double waited_);
  std::size_t immovable;  // bytes that cannot be moved, or were not in time
  std::size_t budget;     // bytes that were asked for
  double waited;          // seconds
};

// A check of the core's own invariants failed: a bug in ballonet.
struct InvariantBroken : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Printf into a std::string; for messages only.
std::string format(const char* pattern, ...) __attribute__((format(printf, 1, 2)));

// "24 B", "1.50 MiB", "12.25 GiB"; in units up to the `largest`, of which 0 is B.
std::string in_units(unsigned long long bytes, unsigned largest = 4);

}  // namespace ballonet
