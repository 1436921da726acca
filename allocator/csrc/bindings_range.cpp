// Ranges, and the groups that they are leased in.
#include "bindings.h"
#include "tensor.h"

namespace ballonet {
namespace {

const char* name_of(Backing backing) {
  constexpr const char* kNames[] = {"none", "device", "host", "alias", "retiring", "kept"};
  return kNames[static_cast<unsigned>(backing)];
}

}  // namespace

void bind_range(py::module_& module) {
  py::class_<Group, std::shared_ptr<Group>>(module, "Group")
      .def("enter", &Group::enter, ReleaseGil())
      .def(
          "leave", [](Group& g, std::uint64_t thread) { g.leave(static_cast<pthread_t>(thread)); }, py::arg("thread"),
          ReleaseGil())
      .def(
          "leave", [](Group& g) { g.leave(); }, ReleaseGil())
      .def_property_readonly("leases", &Group::leases)
      .def_property_readonly("unpinned", [](Group& g) { return g.unpinned.load(); });

  py::class_<RangeHandle>(module, "Range")
      .def_property_readonly("address", [](RangeHandle& r) { return r.range->base; })
      .def_property_readonly("nbytes", [](RangeHandle& r) { return r.range->pieces * r.mapper().page_size; })
      .def_property_readonly("pieces", [](RangeHandle& r) { return r.range->pieces; })
      .def_property_readonly("backed", [](RangeHandle& r) { return r.mapper().backed(*r.range); })
      .def_property_readonly("owner", [](RangeHandle& r) { return name_of(r.range->owner); })
      .def_property_readonly("closed", [](RangeHandle& r) { return r.closed; })
      .def(
          "map",
          [](RangeHandle& r, std::size_t first, std::size_t count) {
            r.device->map(*r.range, first, count, Place::kDevice);
          },
          py::arg("first"), py::arg("count"), ReleaseGil())
      .def(
          "map_ahead",
          [](RangeHandle& r, std::size_t first, std::size_t count) { r.mapper().map_ahead(r.range, first, count); },
          py::arg("first"), py::arg("count"))
      .def(
          "map_host",
          [](RangeHandle& r, std::size_t first, std::size_t count) {
            r.device->map(*r.range, first, count, Place::kHost);
          },
          py::arg("first"), py::arg("count"), ReleaseGil())
      .def(
          "alias",
          [](RangeHandle& r, std::size_t first, RangeHandle& source, std::size_t source_first, std::size_t count) {
            return r.mapper().alias(*r.range, first, *source.range, source_first, count);
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
          "move",
          [](RangeHandle& r, std::size_t piece, const std::string& to) {
            return r.mapper().move(*r.range, piece, place_named(to));
          },
          py::arg("piece"), py::arg("to"), ReleaseGil())
      .def(
          "backing", [](RangeHandle& r, std::size_t piece) { return name_of(r.mapper().backing(*r.range, piece)); },
          py::arg("piece"))
      .def(
          "page",
          [](RangeHandle& r, std::size_t piece) {
            const PageId page = r.mapper().page(*r.range, piece);
            return page == kNoPage ? std::int64_t{-1} : std::int64_t{page};
          },
          py::arg("piece"))
      .def(
          "tensor",
          [](RangeHandle& r, std::size_t offset, const std::vector<std::int64_t>& shape,
             const std::vector<std::int64_t>& strides, int code,
             int bits) { return make_tensor(r.range, offset, shape, strides, code, bits); },
          py::arg("offset"), py::arg("shape"), py::arg("strides"), py::arg("code"), py::arg("bits"))
      .def(
          "note_use",
          [](RangeHandle& r, std::uint64_t stream, bool write) {
            r.mapper().note_use(*r.range, stream_at(stream), write);
          },
          py::arg("stream"), py::arg("write"))
      .def(
          "close",
          [](RangeHandle& r) {
            r.mapper().close(*r.range);
            r.closed = true;
          },
          ReleaseGil());
}

}  // namespace ballonet
