// Ranges, and the groups that they are leased in.
#include <pybind11/pybind11.h>

#include <memory>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "mapping/mapper.h"
#include "mapping/transfer.h"

namespace ballonet {

// DLPack: how bytes of a range become a tensor without linking torch. The layout is that of DLPack 0.8, which every
// torch that ballonet supports reads.
//
// Guarantees: for as long as a tensor lives, its range does, and no piece under it is retired, but for a window.
//
// Lock: making a tensor takes the mapper's, and so does the end of the last one.

namespace {

constexpr int kDLCPU = 1;
constexpr int kDLUInt = 1;

struct DLTensor {
  void* data;
  struct {
    std::int32_t device_type;
    std::int32_t device_id;
  } device;
  std::int32_t ndim;
  struct {
    std::uint8_t code;
    std::uint8_t bits;
    std::uint16_t lanes;
  } dtype;
  std::int64_t* shape;
  std::int64_t* strides;
  std::uint64_t byte_offset;
};

struct DLManagedTensor {
  DLTensor tensor;
  void* context;
  void (*deleter)(DLManagedTensor*);
};

// What a tensor keeps alive.
struct Held {
  DLManagedTensor managed;
  std::shared_ptr<Range> range;
  std::size_t offset, size;  // that are pinned, in the case of a window none
  bool window;
  std::vector<std::int64_t> shape, strides;

  ~Held() { window ? range->close_window() : range->unpin(offset, size); }
};

void drop(DLManagedTensor* managed) {
  without_gil([managed] { delete static_cast<Held*>(managed->context); });
}

// A capsule that nobody consumed still owns what it holds.
void drop_unused(PyObject* capsule) {
  if (PyCapsule_IsValid(capsule, "dltensor") == 0) return;
  drop(static_cast<DLManagedTensor*>(PyCapsule_GetPointer(capsule, "dltensor")));
}

// A capsule over [offset, ...) of the range, of which `size` bytes are pinned, or which is an open window.
pybind11::capsule over(const std::shared_ptr<Range>& range, std::size_t offset, std::size_t size, bool window,
                       const std::vector<std::int64_t>& shape, const std::vector<std::int64_t>& strides, int code,
                       int bits) {
  auto* held = new Held{{}, range, offset, size, window, shape, strides};
  const AddressSpace& space = range->mapper->space;
  DLTensor& tensor = held->managed.tensor;
  tensor.data = reinterpret_cast<void*>(range->base + offset);
  tensor.device = {space.driver.is_standin() ? kDLCPU : cuda::kDLPackDevice,
                   space.driver.is_standin() ? 0 : space.context.ordinal};
  tensor.ndim = static_cast<std::int32_t>(shape.size());
  tensor.dtype = {static_cast<std::uint8_t>(code), static_cast<std::uint8_t>(bits), 1};
  tensor.shape = held->shape.data();
  tensor.strides = held->strides.data();
  tensor.byte_offset = 0;
  held->managed.context = held;
  held->managed.deleter = drop;
  return pybind11::reinterpret_steal<pybind11::capsule>(PyCapsule_New(&held->managed, "dltensor", drop_unused));
}

}  // namespace

// A capsule over [offset, ...) of the range. Strides are in elements; `code` and `bits` are DLPack's. The bytes under
// it are pinned until the last tensor over them is gone. Throws UsageError where one of them is not backed.
pybind11::capsule make_tensor(const std::shared_ptr<Range>& range, std::size_t offset,
                              const std::vector<std::int64_t>& shape, const std::vector<std::int64_t>& strides,
                              int code, int bits) {
  if (shape.size() != strides.size()) throw UsageError("a tensor needs as many strides as dimensions");
  if (bits <= 0 || bits % 8 != 0) throw UsageError("elements must be whole bytes");
  std::size_t elements = 1;  // up to the last one reached
  for (std::size_t i = 0; i < shape.size(); ++i) {
    if (shape[i] < 0 || strides[i] < 0) throw UsageError("shapes and strides must not be negative");
    if (shape[i] == 0) elements = 0;
    if (elements == 0) continue;
    std::size_t reach = 0;
    if (__builtin_mul_overflow(shape[i] - 1, strides[i], &reach) || __builtin_add_overflow(elements, reach, &elements))
      throw UsageError("the tensor spans more than any memory has");
  }
  std::size_t size = 0;
  if (__builtin_mul_overflow(elements, static_cast<std::size_t>(bits / 8), &size))
    throw UsageError("the tensor spans more than any memory has");
  without_gil([&] { range->pin(offset, size); });
  return over(range, offset, size, false, shape, strides, code, bits);
}

// A capsule over [offset, offset + size) of the range as uint8, of which no byte need be backed: it pins nothing, and
// pieces under it come and go. A read or write without a page behind it faults. Throws UsageError where the range is
// smaller.
pybind11::capsule make_window(const std::shared_ptr<Range>& range, std::size_t offset, std::size_t size) {
  const std::size_t extent = range->pieces * range->mapper->space.page_size;
  if (offset > extent || size > extent - offset) {
    throw UsageError(format("%zu bytes at %zu lie outside a range of %zu bytes", size, offset, extent));
  }
  without_gil([&] { range->open_window(); });
  return over(range, offset, 0, true, {static_cast<std::int64_t>(size)}, {1}, kDLUInt, 8);
}

namespace {

const char* name_of(LeadsTo leads_to) {
  constexpr const char* kNames[] = {"none", "device", "host", "peer", "alias", "pending_free", "kept"};
  return kNames[static_cast<unsigned>(leads_to)];
}

template <Place place>
void map(RangeHandle& range, std::size_t first, std::size_t count) {
  range.device->map(*range.range, first, count, place);
}

// The groups that its user has entered, each with the thread that did. Destroying it leaves them, so that nothing that
// interrupts Python can keep them. Used with the GIL.
class Lease {
 public:
  Lease() = default;
  ~Lease() { close(); }
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;

  void enter(const std::shared_ptr<Group>& group) {
    for (const auto& [entered, thread] : entered_) {
      if (entered == group) return;
    }
    entered_.reserve(entered_.size() + 1);  // before: what is entered is noted
    {
      py::gil_scoped_release release;
      group->enter();
    }
    entered_.emplace_back(group, pthread_self());
  }

  void close() {
    auto entered = std::exchange(entered_, {});
    without_gil([&] {
      for (const auto& [group, thread] : entered) group->leave(thread);
      entered.clear();
    });
  }

 private:
  std::vector<std::pair<std::shared_ptr<Group>, pthread_t>> entered_;
};

}  // namespace

void bind_range(py::module_& module) {
  py::class_<Group, std::shared_ptr<Group>>(module, "Group")
      .def("enter", &Group::enter, ReleaseGil())
      .def(
          "leave", [](Group& g) { g.leave(); }, ReleaseGil())
      .def_property_readonly("leases", py::cpp_function(&Group::leases, ReleaseGil()))
      .def_property_readonly("unpinned", [](Group& g) { return g.unpinned.load(); });

  py::class_<Lease>(module, "Lease")
      .def(py::init())
      .def("enter", &Lease::enter, py::arg("group"))
      .def("close", &Lease::close);

  py::class_<RangeHandle>(module, "Range")
      .def_property_readonly("address", [](RangeHandle& r) { return r.range->base; })
      .def_property_readonly("nbytes", [](RangeHandle& r) { return r.range->pieces * r.mapper().space.page_size; })
      .def_property_readonly("pieces", [](RangeHandle& r) { return r.range->pieces; })
      .def_property_readonly("backed", py::cpp_function([](RangeHandle& r) { return r.range->backed(); }, ReleaseGil()))
      .def_property_readonly("owner", [](RangeHandle& r) { return name_of(r.range->owner); })
      .def_property_readonly("closed", [](RangeHandle& r) { return r.closed; })
      .def("map", &map<Place::kDevice>, py::arg("first"), py::arg("count"), ReleaseGil())
      .def(
          "runs",
          [](RangeHandle& r, std::size_t first, std::size_t count) {
            std::vector<std::tuple<std::size_t, std::size_t, LeadsTo>> runs;
            {
              py::gil_scoped_release release;
              runs = r.range->runs(first, count);
            }
            py::list rows;
            for (const auto& [at, pieces, leads_to] : runs) rows.append(py::make_tuple(at, pieces, name_of(leads_to)));
            return rows;
          },
          py::arg("first"), py::arg("count"))
      .def(
          "map_ahead",
          [](RangeHandle& r, std::size_t first, std::size_t count) { r.mapper().ahead.ask(r.range, first, count); },
          py::arg("first"), py::arg("count"))
      .def("map_host", &map<Place::kHost>, py::arg("first"), py::arg("count"), ReleaseGil())
      .def("map_peer", &map<Place::kPeer>, py::arg("first"), py::arg("count"), ReleaseGil())
      .def(
          "take_over",
          [](RangeHandle& r, std::size_t first, RangeHandle& spare, std::size_t spare_first, std::size_t count,
             RangeHandle& range) {
            return r.mapper().aliasing.take_over(*r.range, first, *spare.range, spare_first, count, *range.range);
          },
          py::arg("first"), py::arg("spare"), py::arg("spare_first"), py::arg("count"), py::arg("range"), ReleaseGil())
      .def(
          "adopt",
          [](RangeHandle& r, std::size_t first, RangeHandle& spare, std::size_t spare_first, std::size_t count) {
            return r.mapper().aliasing.adopt(*r.range, first, *spare.range, spare_first, count);
          },
          py::arg("first"), py::arg("spare"), py::arg("spare_first"), py::arg("count"), ReleaseGil())
      .def(
          "place",
          [](RangeHandle& r, std::size_t piece) {
            const std::optional<Place> place = r.range->place(piece);
            return place ? name_of(*place) : "";
          },
          py::arg("piece"), ReleaseGil())
      .def(
          "alias",
          [](RangeHandle& r, std::size_t first, RangeHandle& source, std::size_t source_first, std::size_t count) {
            return r.mapper().aliasing.alias(*r.range, first, *source.range, source_first, count);
          },
          py::arg("first"), py::arg("source"), py::arg("source_first"), py::arg("count"), ReleaseGil())
      .def(
          "own",
          [](RangeHandle& r, std::size_t first, std::size_t count) { return r.device->own(*r.range, first, count); },
          py::arg("first"), py::arg("count"), ReleaseGil())
      .def(
          "retire",
          [](RangeHandle& r, std::size_t first, std::size_t count) { r.mapper().retire(*r.range, {{first, count}}); },
          py::arg("first"), py::arg("count"), ReleaseGil())
      .def(
          "drop_kept",
          [](RangeHandle& r, std::size_t piece) {
            Section in(r.mapper().space);
            return r.mapper().cached.drop(*r.range, piece);
          },
          py::arg("piece"), ReleaseGil())
      .def(
          "move",
          [](RangeHandle& r, std::size_t piece, const std::string& to) {
            return r.mapper().moves.move(*r.range, piece, place_named(to));
          },
          py::arg("piece"), py::arg("to"), ReleaseGil())
      .def(
          "leads_to", [](RangeHandle& r, std::size_t piece) { return name_of(r.range->leads_to(piece)); },
          py::arg("piece"), ReleaseGil())
      .def(
          "page",
          [](RangeHandle& r, std::size_t piece) {
            const PageId page = r.range->page(piece);
            return page == kNoPage ? std::int64_t{-1} : std::int64_t{page};
          },
          py::arg("piece"), ReleaseGil())
      .def(
          "tensor",
          [](RangeHandle& r, std::size_t offset, const std::vector<std::int64_t>& shape,
             const std::vector<std::int64_t>& strides, int code,
             int bits) { return make_tensor(r.range, offset, shape, strides, code, bits); },
          py::arg("offset"), py::arg("shape"), py::arg("strides"), py::arg("code"), py::arg("bits"))
      .def(
          "window",
          [](RangeHandle& r, std::size_t offset, std::size_t nbytes) { return make_window(r.range, offset, nbytes); },
          py::arg("offset"), py::arg("nbytes"))
      .def(
          "note_use",
          [](RangeHandle& r, std::uint64_t stream, bool write) {
            r.mapper().fences.note_use(*r.range, stream_at(stream), write);
          },
          py::arg("stream"), py::arg("write"), ReleaseGil())
      .def(
          "close",
          [](RangeHandle& r) {
            r.mapper().close(*r.range);
            r.closed = true;
          },
          ReleaseGil());
}

// Copies, and memory of the process that they read.

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
