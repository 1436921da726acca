// Ranges, and the groups that they are leased in.
#include <utility>

#include "bindings/bindings.h"
#include "bindings/tensor.h"

namespace ballonet {
namespace {

const char* name_of(LeadsTo leads_to) {
  constexpr const char* kNames[] = {"none", "device", "host", "peer", "alias", "retiring", "kept"};
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

}  // namespace ballonet
