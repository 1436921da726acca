// What Python sees of the core; `_native.pyi` documents it. Whatever can wait for a lock or a device releases the GIL
// first.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "device.h"

namespace ballonet {

namespace py = pybind11;

using ReleaseGil = py::call_guard<py::gil_scoped_release>;

// Throw UsageError for other names.
Owner owner_named(const std::string& name);
Place place_named(const std::string& name);
const char* name_of(Owner owner);

inline CUstream stream_at(std::uint64_t stream) { return reinterpret_cast<CUstream>(stream); }

// A range as Python holds it: collecting it closes it.
struct RangeHandle {
  RangeHandle(std::shared_ptr<Device> device_, std::shared_ptr<Range> range_)
      : device(std::move(device_)), range(std::move(range_)) {}
  ~RangeHandle() { range->mapper->close(*range); }
  RangeHandle(const RangeHandle&) = delete;
  RangeHandle& operator=(const RangeHandle&) = delete;

  Mapper& mapper() const { return *range->mapper; }

  std::shared_ptr<Device> device;
  std::shared_ptr<Range> range;
  bool closed = false;
};

void bind_device(py::class_<Device, std::shared_ptr<Device>>& device);
void bind_reclaim(py::class_<Device, std::shared_ptr<Device>>& device);
void bind_range(py::module_& module);
void bind_transfer(py::module_& module);

}  // namespace ballonet
