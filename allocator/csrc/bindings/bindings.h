// The core's Python bindings; `_native.pyi` documents them.
//
// Note [The GIL]
// A call that waits for a lock of the core releases the GIL first, destructors too: the holder of the lock may wait for
// a device, and that for a host function that needs the GIL. Only locks that are held for moments, with nothing else
// taken under them, are waited for with it (events, timelines, requests to map ahead).
//
// Lock: none is wanted; each call takes those of the core that it needs.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "device/device.h"

namespace ballonet {

namespace py = pybind11;

using ReleaseGil = py::call_guard<py::gil_scoped_release>;

// Throw UsageError for other names.
Owner owner_named(const std::string& name);
Place place_named(const std::string& name);
const char* name_of(Place place);
const char* name_of(Owner owner);

// Runs `act`, which may wait, without the GIL, if this thread has it.
template <class Act>
void without_gil(Act act) {
  if (Py_IsInitialized() == 0 || PyGILState_Check() == 0) return act();
  py::gil_scoped_release release;
  act();
}

// Wraps a pointer so that its last release waits without the GIL.
template <class T>
std::shared_ptr<T> ends_without_gil(std::shared_ptr<T> owned) {
  T* const it = owned.get();
  return {it, [owned = std::move(owned)](T*) mutable { without_gil([&] { owned.reset(); }); }};
}

inline CUstream stream_at(std::uint64_t stream) { return reinterpret_cast<CUstream>(stream); }

// A range as Python holds it: collecting it closes it.
struct RangeHandle {
  RangeHandle(std::shared_ptr<Device> device_, std::shared_ptr<Range> range_)
      : device(std::move(device_)), range(std::move(range_)) {}
  ~RangeHandle() {
    without_gil([this] {
      range->mapper->close(*range);
      range.reset();
      device.reset();
    });
  }
  RangeHandle(const RangeHandle&) = delete;
  RangeHandle& operator=(const RangeHandle&) = delete;

  Mapper& mapper() const { return *range->mapper; }

  std::shared_ptr<Device> device;
  std::shared_ptr<Range> range;
  bool closed = false;
};

void bind_device(py::class_<Device, std::shared_ptr<Device>>& device);
void bind_reclaim(py::class_<Device, std::shared_ptr<Device>>& device);
void bind_frames(py::module_& module);
void bind_interrupts(py::module_& module);
void bind_range(py::module_& module);
void bind_transfer(py::module_& module);

}  // namespace ballonet
