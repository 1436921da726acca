#include "driver/driver.h"

#include <dlfcn.h>

#include <cstdlib>
#include <map>
#include <mutex>

namespace ballonet {
namespace {

constexpr const char* kNames[] = {
#define BALLONET_X(name, ...) #name,
    BALLONET_DRIVER_FUNCTIONS(BALLONET_X)
#undef BALLONET_X
};

using Counts = std::array<std::atomic<unsigned long long>, kFnCount>;
Counts g_numbers{}, g_caller_calls{}, g_background_calls{};  // the first: of the last call

// Faults that are still to come: (function, nth call of it), and the error.
std::mutex g_faults_mutex;
std::map<std::pair<Fn, unsigned long long>, CUresult> g_faults;
std::atomic<bool> g_any_armed{false};
std::atomic<unsigned long long> g_fired{0};

thread_local unsigned long long t_page_table_ns = 0;
thread_local bool t_background = false;

std::array<unsigned long long, kFnCount> loaded(const Counts& counts) {
  std::array<unsigned long long, kFnCount> calls{};
  for (unsigned i = 0; i < kFnCount; ++i) calls[i] = counts[i].load(std::memory_order_relaxed);
  return calls;
}

Fn function_named(const std::string& name) {
  for (unsigned i = 0; i < kFnCount; ++i) {
    if (name == kNames[i]) return static_cast<Fn>(i);
  }
  throw UsageError(
      "no driver function is called '" + name +
      "'; a fault is written FUNCTION:N, for example cuMemMap:7, with a function that stats().driver_calls lists");
}

}  // namespace

const char* name_of(Fn function) { return kNames[static_cast<unsigned>(function)]; }

void arm_faults(const std::vector<std::pair<std::string, unsigned long long>>& faults) {
  std::map<std::pair<Fn, unsigned long long>, CUresult> parsed;
  for (const auto& [text, nth] : faults) {
    const std::size_t sign = text.find('=');
    const Fn function = function_named(text.substr(0, sign));
    const CUresult usual = function == Fn::cuMemCreate ? cuda::kOutOfMemory : cuda::kOperatingSystem;
    parsed[{function, nth}] =
        sign == std::string::npos ? usual : static_cast<CUresult>(std::atoi(text.c_str() + sign + 1));
  }
  std::lock_guard<std::mutex> lock(g_faults_mutex);
  for (const auto& [call, code] : parsed) {
    if (call.second > g_numbers[static_cast<unsigned>(call.first)]) g_faults[call] = code;
  }
  g_any_armed = !g_faults.empty();
}

unsigned long long page_table_ns() { return t_page_table_ns; }

void count_as_background() { t_background = true; }

void Driver::took(std::int64_t ns) const {
  const auto spent = static_cast<unsigned long long>(ns);
  t_page_table_ns += spent;
  time_[t_background ? 1 : 0].fetch_add(spent, std::memory_order_relaxed);
}

unsigned long long faults_fired() { return g_fired; }

std::array<unsigned long long, kFnCount> driver_calls() { return calls_made().all; }

CallsMade calls_made() {
  CallsMade made{loaded(g_caller_calls), loaded(g_background_calls)};
  for (unsigned i = 0; i < kFnCount; ++i) made.all[i] += made.background[i];
  return made;
}

CUresult Driver::counted_fault(Fn function) {
  const unsigned index = static_cast<unsigned>(function);
  const auto call = g_numbers[index].fetch_add(1, std::memory_order_relaxed) + 1;
  (t_background ? g_background_calls : g_caller_calls)[index].fetch_add(1, std::memory_order_relaxed);
  if (!g_any_armed.load(std::memory_order_relaxed)) return cuda::kSuccess;
  std::lock_guard<std::mutex> lock(g_faults_mutex);
  const auto armed = g_faults.find({function, call});
  if (armed == g_faults.end()) return cuda::kSuccess;
  const CUresult code = armed->second;
  g_faults.erase(armed);
  ++g_fired;
  g_any_armed = !g_faults.empty();
  return code;
}

Driver::Driver(const std::string& library) : library_(library) {
  void* handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* why = dlerror();
    throw DriverUnavailable("the driver library '" + library + "' cannot be loaded: " + (why ? why : "unknown reason"));
  }
  std::string missing;
#define BALLONET_X(name, symbol, ...)                                           \
  table_.name = reinterpret_cast<decltype(table_.name)>(dlsym(handle, symbol)); \
  if (table_.name == nullptr) missing += std::string(missing.empty() ? "" : ", ") + symbol;
  BALLONET_DRIVER_FUNCTIONS(BALLONET_X)
#undef BALLONET_X
#define BALLONET_X(name, symbol, ...) standin_.name = reinterpret_cast<decltype(standin_.name)>(dlsym(handle, symbol));
  BALLONET_STANDIN_FUNCTIONS(BALLONET_X)
#undef BALLONET_X
  if (!missing.empty()) {
    dlclose(handle);
    throw DriverUnavailable("the driver in '" + library + "' is too old: it lacks " + missing);
  }
  // The library stays loaded for as long as the process lives: blocks outlive every object here.
}

void Driver::start() const {
  const Outcome started = cuInit(0U);
  if (started.ok()) return;
  const char* name = nullptr;
  if (table_.cuGetErrorName(started.code(), &name) != cuda::kSuccess || name == nullptr) name = "an unknown error";
  const char* remedy =
      started.code() == cuda::kNoDevice
          ? "it finds no device: is CUDA_VISIBLE_DEVICES empty, or the container started without its GPUs?"
      : started.code() == cuda::kSystemDriverMismatch || started.code() == cuda::kCompatNotSupported
          ? "the library and the kernel's driver are of different versions: restart the machine after an update, or, "
            "in "
            "a container, do not bring a libcuda of its own"
          : "`nvidia-smi` and the kernel's log (dmesg) may say more";
  throw DriverUnavailable(
      format("the driver in '%s' does not start (cuInit: %s, %d); %s", library_.c_str(), name, started.code(), remedy));
}

void Driver::configure(const BallonetStandinConfig& config) const {
  if (is_standin()) standin_.ballonet_standin_configure(&config);
}

void Driver::idle_at_fork(CUdeviceptr address, std::size_t size) const {
  if (standin_.ballonet_standin_idle != nullptr) standin_.ballonet_standin_idle(address, size);
}

void Driver::hold(CUdeviceptr address, std::size_t size, bool held) const {
  if (standin_.ballonet_standin_hold != nullptr) standin_.ballonet_standin_hold(address, size, held ? 1 : 0);
}

void Driver::note_use(CUdeviceptr address, std::size_t size, CUstream stream, bool write) const {
  if (standin_.ballonet_standin_use == nullptr) return;
  const CUresult code = standin_.ballonet_standin_use(address, size, stream, write ? 1 : 0);
  if (code == cuda::kSuccess) return;
  char message[512] = "";
  standin_.ballonet_standin_violation(message, sizeof message);
  throw DriverError("note_use", code, "CUDA_ERROR_ILLEGAL_STATE", message);
}

void Driver::raise(Fn function, CUresult code, const std::string& detail) const {
  const char* name = nullptr;
  if (table_.cuGetErrorName(code, &name) != cuda::kSuccess || name == nullptr) name = "an unknown error";
  std::string why = detail;
  if (standin_.ballonet_standin_violation != nullptr) {
    char message[512] = "";
    standin_.ballonet_standin_violation(message, sizeof message);
    if (message[0] != '\0') why += (why.empty() ? "" : "; ") + std::string(message);
  }
  throw DriverError(name_of(function), code, name, why);
}

DriverScope::DriverScope(const Driver& driver, CUcontext context) : driver_(driver) {
  // A failure here shows in the call that the scope is for, with its own code and name.
  if (driver_.cuCtxGetCurrent(&before_).ok() && before_ != context) switched_ = driver_.cuCtxSetCurrent(context).ok();
  exchanged_ = driver_.cuThreadExchangeStreamCaptureMode(&mode_).ok();
}

DriverScope::~DriverScope() {
  if (exchanged_) driver_.cuThreadExchangeStreamCaptureMode(&mode_);
  if (switched_) driver_.cuCtxSetCurrent(before_);
}

}  // namespace ballonet
