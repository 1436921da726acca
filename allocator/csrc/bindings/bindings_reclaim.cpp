// The reclaim list of a device.
#include <map>

#include "bindings/bindings.h"

namespace ballonet {
namespace {

using SourceTuple = std::tuple<std::size_t, std::uint64_t, std::size_t>;
using PartTuple =
    std::tuple<RangeHandle*, std::size_t, std::size_t, RangeHandle*, std::size_t, std::vector<SourceTuple>>;
using EntryTuple = std::tuple<std::int64_t, std::shared_ptr<Group>, std::vector<PartTuple>>;

Takeable::Part part_of(const PartTuple& tuple) {
  const auto& [handle, first, count, twin, twin_first, sources] = tuple;
  if (handle == nullptr) throw UsageError("a part has a range");
  if (twin == nullptr && !sources.empty()) throw UsageError("what has no twin has no sources");
  Takeable::Part part{handle->range, first, count, {}, twin_first, {}, twin == nullptr};
  if (twin != nullptr) part.twin = twin->range;
  for (const auto& [offset, address, size] : sources) part.sources.push_back({offset, address, size});
  return part;
}

void publish(Device& device, const std::vector<EntryTuple>& tuples, const std::map<std::int64_t, std::size_t>& limits) {
  std::vector<Reclaim::Entry> entries;
  for (const auto& [key, group, parts] : tuples) {
    Reclaim::Entry& entry = entries.emplace_back(Reclaim::Entry{key, {group, {}}, {}});
    for (const PartTuple& part : parts) entry.takeable.parts.push_back(part_of(part));
    const auto limit = limits.find(key);
    if (limit == limits.end()) continue;
    entry.limit = limit->second;
    for (const Takeable::Part& part : entry.takeable.parts) {
      if (part.buffer || !part.sources.empty()) throw UsageError("a divisible entry has neither buffers nor sources");
    }
  }
  device.reclaim.publish(std::move(entries));
}

std::vector<std::tuple<std::int64_t, std::int64_t, std::size_t>> taken(Device& device) {
  std::vector<std::tuple<std::int64_t, std::int64_t, std::size_t>> rows;
  for (const Reclaim::Event& event : device.reclaim.taken()) rows.emplace_back(event.time_ns, event.key, event.pages);
  return rows;
}

// Asked between any two layers, and hardly ever answered with anything but 0: the GIL is kept for that.
std::size_t if_requested(Device& device, std::size_t (Reclaim::*ask)()) {
  if (!device.reclaim.is_requested()) return 0;
  py::gil_scoped_release release;
  return (device.reclaim.*ask)();
}

}  // namespace

void bind_reclaim(py::class_<Device, std::shared_ptr<Device>>& device) {
  device
      .def("publish", &publish, py::arg("entries"), py::arg("limits") = std::map<std::int64_t, std::size_t>{},
           ReleaseGil())
      .def(
          "withdraw", [](Device& d, const std::vector<std::int64_t>& keys) { d.reclaim.withdraw(keys); },
          py::arg("keys"), ReleaseGil())
      .def_property_readonly("published", py::cpp_function([](Device& d) { return d.reclaim.keys(); }, ReleaseGil()))
      .def("taken", &taken, ReleaseGil())
      .def_property_readonly("page_request", [](Device& d) { return if_requested(d, &Reclaim::page_request); })
      .def(
          "take",
          [](Device& d, const std::vector<std::int64_t>& keys, std::optional<std::size_t> pages) {
            return d.reclaim.take(keys, pages.value_or(~std::size_t{0}));
          },
          py::arg("keys"), py::arg("pages") = py::none(), ReleaseGil())
      .def_property_readonly("reclaimed", [](Device& d) { return d.reclaim.pages(); })
      .def_property_readonly("idle", py::cpp_function([](Device& d) { return d.heap.idle_pages(false); }, ReleaseGil()))
      .def_property_readonly("available",
                             py::cpp_function([](Device& d) { return d.mapper->available(); }, ReleaseGil()))
      .def("yield_pages", [](Device& d) { return if_requested(d, &Reclaim::yield_pages); })
      .def(
          "hear_shortages",
          [](Device& d, std::size_t most, std::int64_t patience_ns) { d.reclaim.shortage.listen(most, patience_ns); },
          py::arg("most"), py::arg("patience_ns"), ReleaseGil())
      .def(
          "lacks", [](Device& d, std::size_t pages) { d.reclaim.shortage.ask(pages, false, false); }, py::arg("pages"),
          ReleaseGil())
      .def(
          "shortage", [](Device& d, std::int64_t timeout_ns) { return d.reclaim.shortage.heard(timeout_ns); },
          py::arg("timeout_ns"), ReleaseGil())
      .def(
          "answer_shortage", [](Device& d, bool raised) { d.reclaim.shortage.answer(raised); }, py::arg("raised"),
          ReleaseGil());
  Shortage::apart = [](const std::function<void()>& wait) { without_gil(wait); };
}

}  // namespace ballonet
