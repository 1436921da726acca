#include "bindings/bindings.h"
#include "device/registry.h"
#include "device/replay.h"

namespace ballonet {

Owner owner_named(const std::string& name) {
  if (name == "weights") return Owner::kWeights;
  if (name == "activations") return Owner::kActivations;
  if (name == "kv") return Owner::kKv;
  throw UsageError("an owner is 'weights', 'activations' or 'kv', not '" + name + "'");
}

Place place_named(const std::string& name) {
  if (name == "device") return Place::kDevice;
  if (name == "host") return Place::kHost;
  if (name == "peer") return Place::kPeer;
  throw UsageError("a place is 'device', 'host' or 'peer', not '" + name + "'");
}

const char* name_of(Place place) {
  constexpr const char* kNames[] = {"device", "host", "peer"};
  return kNames[static_cast<unsigned>(place)];
}

const char* name_of(Owner owner) {
  constexpr const char* kNames[] = {"free", "weights", "activations", "kv", "pending_free"};
  return kNames[static_cast<unsigned>(owner)];
}

namespace {

void translate(std::exception_ptr thrown) {
  const auto raise = [](const char* name, auto... arguments) {
    const py::object type = py::module_::import("ballonet.allocator.errors").attr(name);
    const py::object error = type(arguments...);
    PyErr_SetObject(type.ptr(), error.ptr());
  };
  try {
    std::rethrow_exception(thrown);
  } catch (const DriverError& error) {
    raise("DriverError", error.function, error.code, error.name, error.detail);
  } catch (const DriverUnavailable& error) {
    raise("DriverUnavailable", std::string(error.what()));
  } catch (const PoolExhausted& error) {
    raise("PoolExhausted", std::string(error.what()));
  } catch (const BudgetInUse& error) {
    raise("BudgetInUse", error.immovable, error.budget, error.waited);
  } catch (const InvariantBroken& error) {
    raise("InvariantBroken", std::string(error.what()));
  } catch (const UsageError& error) {
    raise("BallonetError", std::string(error.what()));
  }
}

py::dict probe(const std::string& library, int ordinal) {
  const Driver driver(library);
  driver.start();
  py::dict facts;
  int version = 0, devices = 0;
  driver.cuDriverGetVersion(&version).or_throw();
  driver.cuDeviceGetCount(&devices).or_throw();
  facts["library"] = library;
  facts["kind"] = driver.is_standin() ? "standin" : "cuda";
  facts["driver_version"] = version;
  facts["devices"] = devices;
  if (ordinal >= devices) return facts;
  CUdevice device = 0;
  driver.cuDeviceGet(&device, ordinal).or_throw();
  char name[256] = "";
  driver.cuDeviceGetName(name, static_cast<int>(sizeof name), device).or_throw();
  std::size_t total = 0;
  driver.cuDeviceTotalMem(&total, device).or_throw();
  unsigned flags = 0;
  int active = 0;
  driver.cuDevicePrimaryCtxGetState(device, &flags, &active).or_throw();
  const auto has = [&](int attribute) {
    int value = 0;
    return driver.cuDeviceGetAttribute(&value, attribute, device).ok() && value != 0;
  };
  facts["name"] = std::string(name);
  facts["total_memory"] = total;
  facts["virtual_memory"] = has(cuda::kAttributeVirtualMemory);
  facts["host_pages"] = has(cuda::kAttributeHostNumaVirtualMemory);
  facts["posix_handles"] = has(cuda::kAttributePosixFd);
  facts["context_active"] = active != 0;
  py::list peers;
  for (int other = 0; other < devices; ++other) {
    CUdevice there = 0;
    int reachable = 0;
    if (other == ordinal || !driver.cuDeviceGet(&there, other).ok()) continue;
    if (driver.cuDeviceCanAccessPeer(&reachable, device, there).ok() && reachable != 0) peers.append(other);
  }
  facts["peers"] = peers;
  return facts;
}

py::dict replayed(Device& device, const py::bytes& ops, std::size_t parts) {
  const std::string_view rows = ops;
  Replayed result;
  {
    py::gil_scoped_release release;
    result = replay(device, rows, parts);
  }
  py::dict numbers;
  numbers["peak_live"] = result.peak_live;
  numbers["peak_physical"] = result.peak_physical;
  numbers["physical"] = result.physical;
  numbers["driver_calls"] = result.driver_calls;
  numbers["ns_per_op"] = result.ns_per_op;
  numbers["ops"] = result.ops;
  return numbers;
}

}  // namespace

}  // namespace ballonet

PYBIND11_MODULE(_native, module) {
  using namespace ballonet;
  py::register_exception_translator(&translate);
  py::class_<Device, std::shared_ptr<Device>> device(module, "Device");
  py::class_<Checkpoint>(module, "Checkpoint");
  bind_frames(module);
  bind_interrupts(module);
  bind_range(module);
  bind_transfer(module);
  bind_device(device);
  bind_reclaim(device);
  module.def("probe", &probe, py::arg("library"), py::arg("ordinal"));
  module.def("core_table", [] { return reinterpret_cast<std::uintptr_t>(core_table()); });
  module.def("entry_points", [] {
    py::dict points;
    for (const auto& [name, address] : plain_entry_points()) points[name] = address;
    return points;
  });
  module.def("replay", &replayed, py::arg("device"), py::arg("ops"), py::arg("parts") = 1);
}
