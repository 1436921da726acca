// Reads the first argument of running calls, on any thread.
//
// Note [Locals of another thread]
// Up to Python 3.12 `frame.f_locals` copies all variables into a dictionary that the frame keeps. What it replaces
// there is freed; that may let other threads run, the frame may return meanwhile, and the copying goes on in memory
// that is no frame any more. So one variable is read, and none is kept.
#include <Python.h>

#if PY_VERSION_HEX < 0x030c0000  // which has no PyFrame_GetVar
#define Py_BUILD_CORE
extern "C" {
#include <internal/pycore_frame.h>
}
#undef Py_BUILD_CORE
#endif

#include "bindings/bindings.h"

namespace ballonet {
namespace {

// The first variable of a frame, which is the first argument; null where it is unbound.
py::object first_variable(PyFrameObject* frame, const py::object& code) {
#if PY_VERSION_HEX < 0x030c0000
  (void)code;
  PyObject* value = frame->f_frame->localsplus[0];
  if (value != nullptr && PyCell_Check(value)) value = PyCell_GET(value);  // an inner function has it too
  return py::reinterpret_borrow<py::object>(value);
#else
  const py::object names = code.attr("co_varnames");
  PyObject* value = PyFrame_GetVar(frame, PyTuple_GET_ITEM(names.ptr(), 0));
  if (value == nullptr) PyErr_Clear();
  return py::reinterpret_steal<py::object>(value);
#endif
}

py::object first_argument(const py::object& frame) {
  if (!PyFrame_Check(frame.ptr())) throw py::type_error("first_argument() takes a frame");
  auto* const it = reinterpret_cast<PyFrameObject*>(frame.ptr());
  const auto code = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetCode(it)));
  if (code.attr("co_argcount").cast<int>() == 0) return py::none();
  const py::object value = first_variable(it, code);
  return value ? value : py::none();
}

}  // namespace

void bind_frames(py::module_& module) { module.def("first_argument", &first_argument, py::arg("frame")); }

}  // namespace ballonet
