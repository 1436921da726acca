// The device: its numbers, blocks, and ranges made of it.
#include "bindings.h"
#include "registry.h"

namespace ballonet {
namespace {

std::shared_ptr<Device> make_device(const std::string& library, int ordinal, std::size_t page_size, std::size_t budget,
                                    std::size_t host_budget, std::uint64_t link_bandwidth,
                                    std::uint64_t link_latency_ns,
                                    const std::vector<std::pair<std::string, unsigned long long>>& faults) {
  if (page_size == 0) throw UsageError("the page size must not be 0");
  arm_faults(faults);
  Mapper::Options options;
  options.library = library;
  options.ordinal = ordinal;
  options.page_size = page_size;
  options.budget = budget / page_size;
  options.host_budget = host_budget / page_size;
  options.standin = {0, link_bandwidth, link_latency_ns};
  return std::make_shared<Device>(options);
}

py::dict snapshot(Device& device) {
  Mapper::Numbers numbers;
  Heap::Numbers heap;
  {
    // The books of the two are read without an allocation in between.
    py::gil_scoped_release release;
    std::tie(numbers, heap) = device.numbers();
  }
  const std::size_t page = device.mapper->page_size;
  py::dict pages, copied, calls, blocks, result;
  for (unsigned i = 0; i < kOwners; ++i) pages[name_of(static_cast<Owner>(i))] = numbers.pages[i];
  copied["weights_h2d"] = numbers.copied.weights_h2d;
  copied["weights_d2h"] = numbers.copied.weights_d2h;
  copied["kv_h2d"] = numbers.copied.kv_h2d;
  copied["kv_d2h"] = numbers.copied.kv_d2h;
  const auto counts = driver_calls();
  for (unsigned i = 0; i < kFnCount; ++i) calls[ballonet::name_of(static_cast<Fn>(i))] = counts[i];
  blocks["live"] = heap.live;
  blocks["live_peak"] = heap.live_peak;
  blocks["requested"] = heap.requested;
  blocks["requested_peak"] = heap.requested_peak;
  blocks["reserved"] = numbers.pages[static_cast<unsigned>(Owner::kActivations)] * page;
  blocks["cached"] = heap.cached;
  blocks["blocks"] = heap.blocks;
  blocks["allocations"] = heap.allocations;
  blocks["frees"] = heap.frees;
  blocks["hits"] = heap.hits;
  blocks["allocated_total"] = heap.allocated_total;
  blocks["freed_total"] = heap.freed_total;
  result["page_size"] = page;
  result["budget"] = numbers.budget * page;
  result["created"] = numbers.created;
  result["physical_peak"] = numbers.created_peak * page;
  result["pages"] = pages;
  result["host_pages"] = numbers.host_created;
  result["host_free"] = numbers.host_free;
  result["host_budget"] = numbers.host_budget * page;
  result["copied"] = copied;
  result["driver_calls"] = calls;
  result["faults"] = faults_fired();
  result["reclaimed"] = device.reclaim.pages();
  result["heap"] = blocks;
  return result;
}

py::list timeline(Device& device) {
  py::list rows;
  for (const Journal::Sample& sample : device.mapper->journal.drain()) {
    const auto& pages = sample.pages;
    rows.append(py::make_tuple(sample.time_ns, pages[0], pages[1], pages[2], pages[3], pages[4]));
  }
  return rows;
}

}  // namespace

void bind_device(py::class_<Device, std::shared_ptr<Device>>& device) {
  device
      .def(py::init(&make_device), py::kw_only(), py::arg("library"), py::arg("ordinal"), py::arg("page_size"),
           py::arg("budget"), py::arg("host_budget"), py::arg("link_bandwidth") = 0, py::arg("link_latency_ns") = 0,
           py::arg("faults") = std::vector<std::pair<std::string, unsigned long long>>{})
      .def_property_readonly("kind", [](Device& d) { return d.mapper->is_standin() ? "standin" : "cuda"; })
      .def_property_readonly("ordinal", [](Device& d) { return d.mapper->ordinal; })
      .def_property_readonly("page_size", [](Device& d) { return d.mapper->page_size; })
      .def_property_readonly("budget", [](Device& d) { return d.mapper->numbers().budget * d.mapper->page_size; })
      .def_property_readonly("host_pages", [](Device& d) { return d.mapper->has_host_pages(); })
      .def(
          "free_memory", [](Device& d) { return d.mapper->free_memory(); }, ReleaseGil())
      .def("set_budget", &Device::set_budget, py::arg("nbytes"), ReleaseGil())
      .def("snapshot", &snapshot)
      .def("reset_peaks",
           [](Device& d) {
             d.heap.reset_peaks();
             d.mapper->reset_peak();
           })
      .def("trim", &Device::trim, ReleaseGil())
      .def(
          "reap", [](Device& d, bool wait) { return d.mapper->reap(wait); }, py::arg("wait") = false, ReleaseGil())
      .def(
          "allocate",
          [](Device& d, std::size_t size, std::uint64_t stream) {
            if (size == 0) throw UsageError("a block has at least one byte");
            return reinterpret_cast<std::uint64_t>(d.heap.allocate(size, stream_at(stream)));
          },
          py::arg("nbytes"), py::arg("stream") = 0, ReleaseGil())
      .def(
          "deallocate", [](Device& d, std::uint64_t address) { d.heap.deallocate(reinterpret_cast<void*>(address)); },
          py::arg("address"), ReleaseGil())
      .def(
          "record_stream",
          [](Device& d, std::uint64_t address, std::uint64_t stream) {
            d.heap.record_stream(reinterpret_cast<void*>(address), stream_at(stream));
          },
          py::arg("address"), py::arg("stream"), ReleaseGil())
      .def(
          "block_size",
          [](Device& d, std::uint64_t address) { return d.heap.block_size(reinterpret_cast<void*>(address)); },
          py::arg("address"))
      .def("group", [](Device&) { return std::make_shared<Group>(); })
      .def(
          "reserve",
          [](const std::shared_ptr<Device>& d, std::size_t size, const std::string& owner, std::shared_ptr<Group> group,
             bool auto_retire) {
            const std::size_t page = d->mapper->page_size;
            const std::size_t pieces = size / page + (size % page != 0 ? 1 : 0);
            auto range = d->mapper->reserve(pieces, owner_named(owner), std::move(group), auto_retire);
            return std::make_unique<RangeHandle>(d, std::move(range));
          },
          py::arg("nbytes"), py::arg("owner"), py::arg("group"), py::arg("auto_retire") = false)
      .def(
          "note_stream", [](Device& d, std::uint64_t stream) { d.mapper->note_stream(stream_at(stream)); },
          py::arg("stream"))
      .def(
          "note_use",
          [](Device& d, std::uint64_t address, std::size_t size, std::uint64_t stream, bool write) {
            d.mapper->note_use(address, size, stream_at(stream), write);
          },
          py::arg("address"), py::arg("nbytes"), py::arg("stream"), py::arg("write"))
      .def(
          "synchronize", [](Device& d) { d.mapper->synchronize(); }, ReleaseGil())
      .def("timeline", &timeline)
      .def("check", &Device::check, ReleaseGil())
      .def("bind", [](const std::shared_ptr<Device>& d) { bind(d); })
      .def("unbind", [](const std::shared_ptr<Device>& d) { unbind(d); })
      .def("close", &Device::close, ReleaseGil());
}

}  // namespace ballonet
