// Copies, and memory of the process that they read.
#include "bindings/bindings.h"
#include "mapping/host_memory.h"
#include "mapping/transfer.h"

namespace ballonet {
namespace {

// Part of a Python buffer, registered: it stays where it is for as long as it is.
struct BufferHandle {
  BufferHandle(const std::shared_ptr<Device>& device, const py::buffer& buffer, std::size_t offset, std::size_t size)
      : view(std::make_unique<py::buffer_info>(buffer.request())) {
    if (view->ndim != 1 || view->strides[0] != view->itemsize) throw UsageError("the buffer is not one run of bytes");
    const std::size_t whole = static_cast<std::size_t>(view->size * view->itemsize);
    if (offset > whole || size > whole - offset) throw UsageError("these bytes are not all in the buffer");
    const void* address = static_cast<const char*>(view->ptr) + offset;
    py::gil_scoped_release release;
    memory = std::make_unique<HostMemory>(device->mapper, address, size);
  }
  ~BufferHandle() {
    py::gil_scoped_release release;
    if (memory->let_go()) return;
    view.release();  // what is still registered stays where it is
  }
  BufferHandle(const BufferHandle&) = delete;
  BufferHandle& operator=(const BufferHandle&) = delete;

  void close() {
    {
      py::gil_scoped_release release;
      memory->close();
    }
    view.reset();
  }

  std::unique_ptr<py::buffer_info> view;
  std::unique_ptr<HostMemory> memory;
};

struct TransferHandle {
  explicit TransferHandle(const std::shared_ptr<Device>& device) {
    without_gil([&] { transfer = std::make_shared<Transfer>(device->mapper); });
  }
  ~TransferHandle() {
    without_gil([this] { transfer.reset(); });
  }
  TransferHandle(const TransferHandle&) = delete;
  TransferHandle& operator=(const TransferHandle&) = delete;

  std::shared_ptr<Transfer> transfer;
};

}  // namespace

void bind_transfer(py::module_& module) {
  py::class_<Transfer::Done, std::shared_ptr<Transfer::Done>>(module, "Done")
      .def(
          "before", [](Transfer::Done& d, std::uint64_t stream) { d.before(stream_at(stream)); }, py::arg("stream"),
          ReleaseGil())
      .def("passed", &Transfer::Done::passed, ReleaseGil())
      .def("wait", &Transfer::Done::wait, ReleaseGil());

  py::class_<TransferHandle>(module, "Transfer")
      .def(py::init<const std::shared_ptr<Device>&>(), py::arg("device"))
      .def(
          "copy",
          [](TransferHandle& t, const std::vector<std::tuple<std::uint64_t, std::uint64_t, std::size_t>>& parts,
             std::optional<std::uint64_t> after, const std::string& owner, const std::string& to) {
            std::optional<CUstream> stream;
            if (after) stream = stream_at(*after);
            std::vector<Copy> copies;
            copies.reserve(parts.size());
            for (const auto& [target, source, size] : parts) copies.push_back({target, source, size});
            return ends_without_gil(t.transfer->copy(copies, stream, owner_named(owner), place_named(to)));
          },
          py::arg("parts"), py::kw_only(), py::arg("after"), py::arg("owner"), py::arg("to"), ReleaseGil());

  py::class_<BufferHandle>(module, "HostMemory")
      .def(py::init<const std::shared_ptr<Device>&, const py::buffer&, std::size_t, std::size_t>(), py::arg("device"),
           py::arg("buffer"), py::arg("offset"), py::arg("nbytes"))
      .def_property_readonly("address",
                             [](BufferHandle& h) { return reinterpret_cast<std::uintptr_t>(h.memory->address()); })
      .def_property_readonly("nbytes", [](BufferHandle& h) { return h.memory->size(); })
      .def_property_readonly("closed", [](BufferHandle& h) { return h.memory->closed(); })
      .def("close", &BufferHandle::close);
}

}  // namespace ballonet
