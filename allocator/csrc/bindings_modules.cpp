// Which modules of torch something was registered in.
//
// Note [Told of every module]
// torch tells a registration hook of each module of the process, and models make lists of their layers in each forward:
// a call of Python for each layer of each token. So the hook is an object of the core, which looks the module up.
#include <unordered_set>
#include <utility>

#include "bindings.h"

namespace ballonet {
namespace {

// Used with the GIL.
struct Registrations {
  std::unordered_set<std::uintptr_t> modules;  // by id
  bool noticed = false;

  void watch(std::unordered_set<std::uintptr_t> ids) { modules = std::move(ids); }

  void tell(const py::object& module, const py::args&) {
    if (modules.count(reinterpret_cast<std::uintptr_t>(module.ptr())) != 0) noticed = true;
  }
};

}  // namespace

void bind_modules(py::module_& module) {
  py::class_<Registrations>(module, "Registrations")
      .def(py::init())
      .def_readwrite("noticed", &Registrations::noticed)
      .def("watch", &Registrations::watch, py::arg("ids"))
      .def("__call__", &Registrations::tell);
}

}  // namespace ballonet
