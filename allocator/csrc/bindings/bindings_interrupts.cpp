// Runs steps that Ctrl-C cannot leave half done.
//
// Note [Interrupted Python]
// Signal handlers run, and raise, between any two instructions of Python, but never in C++. So steps that have to be
// completed are called from here, and called again where an exception ended one in the middle: each may safely be done
// twice. The first exception is raised once all is done. A step's own error comes again each time, so it is tried less
// often.
#include <exception>
#include <utility>

#include "base/tuning.h"
#include "bindings/bindings.h"

namespace ballonet {
namespace {

// Returns what it raised first.
template <class Act>
std::exception_ptr insist(Act act) {
  std::exception_ptr first;
  for (int failed = 0, interrupted = 0; failed < tuning::kUndos && interrupted < tuning::kInterrupted;) {
    try {
      act();
      break;
    } catch (py::error_already_set& error) {
      ++(error.matches(PyExc_Exception) ? failed : interrupted);
      if (!first) first = std::current_exception();
    }
  }
  return first;
}

bool is_finalizing() {
#if PY_VERSION_HEX >= 0x030d0000
  return Py_IsFinalizing() != 0;
#else
  return _Py_IsFinalizing() != 0;
#endif
}

// Takes the steps out of the list and does each of them, in this order. Nothing where Python itself ends: its modules
// may be gone. The other arguments are those of a weak reference's callback.
void finish(const py::list& steps, const py::args&) {
  const py::list taken(steps.attr("copy")());
  steps.attr("clear")();
  if (is_finalizing()) return;
  std::exception_ptr first;
  for (const py::handle& step : taken) {
    const std::exception_ptr raised = insist([&] { step(); });
    if (!first) first = raised;
  }
  if (first) std::rethrow_exception(first);
}

// Calls `act` with the lock, if that is free; was it?
bool if_free(const py::object& lock, const py::object& act) {
  if (!lock.attr("acquire")(false).cast<bool>()) return false;
  try {
    act();
  } catch (...) {
    lock.attr("release")();
    throw;
  }
  lock.attr("release")();
  return true;
}

// A context manager: `section.begin()`, and however that and the block end `section.end(failed)`.
class Guarded {
 public:
  explicit Guarded(py::object section) : section_(std::move(section)) {}
  ~Guarded() {
    try {
      end(true);
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("the end of a section");
    }
  }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;

  py::object enter() {
    if (std::exchange(open_, true)) throw UsageError("the section has begun already");
    try {
      return section_.attr("begin")();
    } catch (py::error_already_set&) {
      insist_on_end(true);
      throw;
    }
  }

  void end(bool failed) {
    if (const std::exception_ptr raised = insist_on_end(failed)) std::rethrow_exception(raised);
  }

 private:
  std::exception_ptr insist_on_end(bool failed) {
    if (!std::exchange(open_, false)) return nullptr;
    return insist([&] { section_.attr("end")(failed); });
  }

  const py::object section_;
  bool open_ = false;
};

}  // namespace

void bind_interrupts(py::module_& module) {
  module.def("finish", &finish, py::arg("steps"));
  module.def("if_free", &if_free, py::arg("lock"), py::arg("act"));
  py::class_<Guarded>(module, "Guarded")
      .def(py::init<py::object>(), py::arg("section"))
      .def("__enter__", &Guarded::enter)
      .def("__exit__",
           [](Guarded& it, const py::object& kind, const py::object&, const py::object&) { it.end(!kind.is_none()); });
}

}  // namespace ballonet
