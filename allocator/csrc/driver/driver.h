// The driver table: every call that ballonet makes to a CUDA driver goes through here, whether the library behind it is
// NVIDIA's or the host stand-in. Loads the library, counts calls, injects faults. No policy.
//
//   driver.cuMemMap(address, size, 0, handle, 0).or_throw("mapping page 7");
//
// Guarantees: every call is counted, and returns what the driver or an armed fault says.
//
// Lock: none here. What changes page tables is called under the mapper's (address_space.h).
#pragma once

#include <array>
#include <atomic>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/errors.h"
#include "driver/driver_abi.h"

namespace ballonet {

enum class Fn : unsigned {
#define BALLONET_X(name, ...) name,
  BALLONET_DRIVER_FUNCTIONS(BALLONET_X)
#undef BALLONET_X
      kCount
};
constexpr unsigned kFnCount = static_cast<unsigned>(Fn::kCount);

const char* name_of(Fn function);

// Arms faults: the nth call of a function since the process started fails, once. One that lies in the past never comes.
// "cuMemMap" fails with an error that may pass (cuMemCreate: for want of memory), "cuMemMap=700" with that one. Throws
// UsageError where a name is not a driver function.
void arm_faults(const std::vector<std::pair<std::string, unsigned long long>>& faults);
unsigned long long faults_fired();

// Calls per function since the process started, all drivers together.
std::array<unsigned long long, kFnCount> driver_calls();

// The same, and those of them that the background thread made: both of the same moment.
struct CallsMade {
  std::array<unsigned long long, kFnCount> all, background;
};
CallsMade calls_made();

// ns of the calling thread in calls that change page tables, all drivers together.
unsigned long long page_table_ns();
// Counts the calling thread's calls as the background's from here on.
void count_as_background();

class Driver {
 public:
  // Loads a library. Post: every function of the list is found. Throws DriverUnavailable with what is missing.
  explicit Driver(const std::string& library);
  Driver(const Driver&) = delete;
  Driver& operator=(const Driver&) = delete;

  bool is_standin() const { return standin_.ballonet_standin_configure != nullptr; }

  // The result of one call, not yet checked.
  class Outcome {
   public:
    Outcome(const Driver* driver, Fn function, CUresult code) : driver_(driver), function_(function), code_(code) {}
    bool ok() const { return code_ == cuda::kSuccess; }
    CUresult code() const { return code_; }
    void or_throw(const std::string& detail = {}) const {
      if (!ok()) driver_->raise(function_, code_, detail);
    }

   private:
    const Driver* driver_;
    Fn function_;
    CUresult code_;
  };

  // Wraps a code that was passed on, as if the call had just been made.
  Outcome judge(Fn function, CUresult code) const { return Outcome(this, function, code); }

#define BALLONET_X(name, symbol, ...)                                            \
  template <class... A>                                                          \
  Outcome name(A... arguments) const {                                           \
    return Outcome(this, Fn::name, invoke(Fn::name, table_.name, arguments...)); \
  }
  BALLONET_DRIVER_FUNCTIONS(BALLONET_X)
#undef BALLONET_X

  // ns of calls that change page tables: of callers, and in the background.
  struct PageTableTime {
    unsigned long long callers, background;
  };
  PageTableTime page_table_time() const { return {time_[0].load(), time_[1].load()}; }

  // Throws DriverUnavailable, with what to do, where the driver has no usable device or does not start.
  void start() const;
  // Stand-in only; does nothing elsewhere.
  void configure(const BallonetStandinConfig& config) const;
  // Has the next fork leave these bytes uncopied in the child. Stand-in only.
  void idle_at_fork(CUdeviceptr address, std::size_t size) const;
  // Keeps the mapping of these bytes readable until another one takes its place, while `held`. Stand-in only: see Note
  // [Readers without a lease] in mapping.h.
  void hold(CUdeviceptr address, std::size_t size, bool held) const;
  // Tells the order checker that work on `stream` uses these bytes. Throws DriverError where an order is missing.
  void note_use(CUdeviceptr address, std::size_t size, CUstream stream, bool write) const;

 private:
  struct Table {
#define BALLONET_X(name, symbol, ...) CUresult (*name)(__VA_ARGS__) = nullptr;
    BALLONET_DRIVER_FUNCTIONS(BALLONET_X)
#undef BALLONET_X
  };
  struct Standin {
#define BALLONET_X(name, symbol, ...) CUresult (*name)(__VA_ARGS__) = nullptr;
    BALLONET_STANDIN_FUNCTIONS(BALLONET_X)
#undef BALLONET_X
  };

  // Counts the call; returns the code of an armed fault, else success.
  static CUresult counted_fault(Fn function);

  static constexpr bool changes_page_tables(Fn function) {
    switch (function) {
      case Fn::cuMemAddressReserve:
      case Fn::cuMemAddressFree:
      case Fn::cuMemCreate:
      case Fn::cuMemRelease:
      case Fn::cuMemMap:
      case Fn::cuMemUnmap:
      case Fn::cuMemSetAccess:
        return true;
      default:
        return false;
    }
  }
  void took(std::int64_t ns) const;

  template <class F, class... A>
  CUresult invoke(Fn function, F pointer, A... arguments) const {
    if (const CUresult fault = counted_fault(function); fault != cuda::kSuccess) return fault;
    if (!changes_page_tables(function)) return pointer(arguments...);
    const std::int64_t began = now_ns();
    const CUresult result = pointer(arguments...);
    took(now_ns() - began);
    return result;
  }

  [[noreturn]] void raise(Fn function, CUresult code, const std::string& detail) const;

  const std::string library_;
  Table table_;
  Standin standin_;
  mutable std::array<std::atomic<unsigned long long>, 2> time_{};  // of callers, in the background
};

// While it lives, this thread has the device's context current and its driver calls cannot break a stream capture of
// the user's (relaxed mode). Restores both.
class DriverScope {
 public:
  DriverScope(const Driver& driver, CUcontext context);
  ~DriverScope();
  DriverScope(const DriverScope&) = delete;
  DriverScope& operator=(const DriverScope&) = delete;

 private:
  const Driver& driver_;
  CUcontext before_ = nullptr;
  bool switched_ = false;
  int mode_ = cuda::kCaptureModeRelaxed;
  bool exchanged_ = false;
};

}  // namespace ballonet
