// The device: its numbers, blocks, and ranges made of it.
#include <algorithm>
#include <map>

#include "bindings/bindings.h"
#include "device/registry.h"

namespace ballonet {

namespace {

std::shared_ptr<Device> make_device(const std::string& library, int ordinal, std::size_t page_size, std::size_t budget,
                                    std::size_t host_budget, std::optional<int> peer, std::size_t peer_budget,
                                    std::uint64_t link_bandwidth, std::uint64_t link_latency_ns,
                                    std::uint64_t peer_bandwidth, bool spill, bool host_pages,
                                    const std::vector<std::pair<std::string, unsigned long long>>& faults,
                                    std::uint64_t unbacked) {
  if (page_size == 0) throw UsageError("the page size must not be 0");
  arm_faults(faults);
  Mapper::Options options;
  options.library = library;
  options.ordinal = ordinal;
  options.page_size = page_size;
  options.budget = budget / page_size;
  options.host_budget = host_budget / page_size;
  options.peer = peer;
  options.peer_budget = peer_budget / page_size;
  options.standin = {unbacked, link_bandwidth, link_latency_ns, peer_bandwidth, unbacked != 0};
  options.host_pages = host_pages;
  py::gil_scoped_release release;
  return ends_without_gil(std::make_shared<Device>(options, spill));
}

// Waits without the GIL; Ctrl-C, and what other signals' handlers raise, ends it.
void set_budget(Device& device, std::size_t nbytes, std::int64_t wait_ns) {
  py::gil_scoped_release release;
  device.set_budget(nbytes, wait_ns, [] {
    py::gil_scoped_acquire acquire;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  });
}

// Says that a block was spilled, as soon as the main thread runs Python again.
PyObject* spill_told = nullptr;

void on_spill(const py::object& tell) {
  Py_XDECREF(std::exchange(spill_told, py::object(tell).release().ptr()));
  BlockSupply::on_spill = [] {
    Py_AddPendingCall(
        [](void*) {
          try {
            py::reinterpret_borrow<py::object>(spill_told)();
          } catch (py::error_already_set& error) {
            error.discard_as_unraisable("a warning of ballonet");  // whatever the main thread does goes on
          }
          return 0;
        },
        nullptr);
  };
}

py::dict snapshot(Device& device) {
  Mapper::Numbers numbers;
  Heap::Numbers heap;
  {
    // The books of the two are read without an allocation in between.
    py::gil_scoped_release release;
    std::tie(numbers, heap) = device.numbers();
  }
  const std::size_t page = device.mapper->space.page_size;
  py::dict pages, copied, calls, background, blocks, time, result;
  for (unsigned i = 0; i < kOwners; ++i) pages[name_of(static_cast<Owner>(i))] = numbers.pages[i];
  copied["weights_h2d"] = numbers.copied.weights_h2d;
  copied["weights_d2h"] = numbers.copied.weights_d2h;
  copied["kv_h2d"] = numbers.copied.kv_h2d;
  copied["kv_d2h"] = numbers.copied.kv_d2h;
  copied["kv_p2d"] = numbers.copied.kv_p2d;
  copied["kv_d2p"] = numbers.copied.kv_d2p;
  copied["kv_p2h"] = numbers.copied.kv_p2h;
  const auto made = calls_made();
  for (unsigned i = 0; i < kFnCount; ++i) {
    const char* const name = ballonet::name_of(static_cast<Fn>(i));
    calls[name] = made.all[i];
    background[name] = made.background[i];
  }
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
  const std::optional<int> peer = device.mapper->space.context.peer();
  result["peer"] = !peer                                           ? ""
                   : *peer == device.mapper->space.context.ordinal ? "second pool"
                                                                   : format("device %d", *peer);
  result["peer_pages"] = numbers.peer_created;
  result["peer_free"] = numbers.peer_free;
  result["peer_budget"] = numbers.peer_budget * page;
  result["copied"] = copied;
  result["driver_calls"] = calls;
  result["background_calls"] = background;
  result["faults"] = faults_fired();
  result["reclaimed"] = device.reclaim.pages();
  result["kept"] = numbers.kept;
  result["ahead"] = numbers.ahead;
  time["callers"] = numbers.time.callers;
  time["background"] = numbers.time.background;
  result["driver_ns"] = time;
  result["heap"] = blocks;
  result["spilled"] = numbers.spilled;
  return result;
}

py::dict memory_stats(Device& device) {
  BallonetStats stats;
  {
    py::gil_scoped_release release;
    stats = device.stats();
  }
  const auto entry = [](const BallonetFigure& figure) {
    py::dict result;
    result["current"] = figure.current;
    result["peak"] = figure.peak;
    result["allocated"] = figure.allocated;
    result["freed"] = figure.freed;
    return result;
  };
  py::dict result;
  const auto put = [&](const char* name, const BallonetFigure(&figures)[BALLONET_CLASSES]) {
    py::dict classes;
    classes["all"] = entry(figures[BALLONET_ALL]);
    classes["small_pool"] = entry(figures[BALLONET_SMALL]);
    classes["large_pool"] = entry(figures[BALLONET_LARGE]);
    result[name] = classes;
  };
  put("allocation", stats.allocation);
  put("segment", stats.segment);
  put("active", stats.active);
  put("inactive_split", stats.inactive_split);
  put("allocated_bytes", stats.allocated_bytes);
  put("reserved_bytes", stats.reserved_bytes);
  put("active_bytes", stats.active_bytes);
  put("inactive_split_bytes", stats.inactive_split_bytes);
  put("requested_bytes", stats.requested_bytes);
  result["num_alloc_retries"] = stats.num_alloc_retries;
  result["num_ooms"] = stats.num_ooms;
  result["num_sync_all_streams"] = stats.num_sync_all_streams;
  result["num_device_alloc"] = stats.num_device_alloc;
  result["num_device_free"] = stats.num_device_free;
  result["max_split_size"] = -1;
  result["oversize_allocations"] = entry({});
  result["oversize_segments"] = entry({});
  return result;
}

py::list segments(Device& device) {
  std::vector<Segment> found;
  {
    py::gil_scoped_release release;
    found = device.segments();
  }
  py::list rows;
  for (const Segment& segment : found) {
    py::list blocks;
    for (const BallonetBlock& block : segment.blocks) {
      const char* state = block.allocated ? "allocated" : block.active ? "pending" : "free";
      blocks.append(py::make_tuple(block.address, block.size, block.requested, state));
    }
    const char* const owner = segment.place == Place::kHost ? "spilled" : name_of(segment.owner);
    rows.append(py::make_tuple(segment.facts.address, segment.facts.size, segment.facts.pool, segment.facts.small,
                               blocks, owner, reinterpret_cast<std::uint64_t>(segment.facts.stream)));
  }
  return rows;
}

std::vector<std::uint64_t> addresses(const std::vector<void*>& pointers) {
  std::vector<std::uint64_t> result;
  for (void* pointer : pointers) result.push_back(reinterpret_cast<std::uint64_t>(pointer));
  return result;
}

py::list events(Device& device) {
  py::list rows;
  for (const Events::Event& event : device.mapper->events.drain()) {
    const char* kind = Events::kNames[static_cast<unsigned>(event.kind)];
    rows.append(py::make_tuple(event.time_ns, kind, event.pages, event.key, event.thread, event.ns));
  }
  return rows;
}

py::list timeline(Device& device) {
  py::list rows;
  for (const Journal::Sample& sample : device.mapper->space.journal.drain()) {
    const auto& pages = sample.pages;
    rows.append(py::make_tuple(sample.time_ns, pages[0], pages[1], pages[2], pages[3], pages[4]));
  }
  return rows;
}

}  // namespace

void bind_device(py::class_<Device, std::shared_ptr<Device>>& device) {
  device
      .def(py::init(&make_device), py::kw_only(), py::arg("library"), py::arg("ordinal"), py::arg("page_size"),
           py::arg("budget"), py::arg("host_budget"), py::arg("peer") = py::none(), py::arg("peer_budget") = 0,
           py::arg("link_bandwidth") = 0, py::arg("link_latency_ns") = 0, py::arg("peer_bandwidth") = 0,
           py::arg("spill") = false, py::arg("host_pages") = true,
           py::arg("faults") = std::vector<std::pair<std::string, unsigned long long>>{}, py::arg("unbacked") = 0)
      .def_property_readonly("kind", [](Device& d) { return d.mapper->space.driver.is_standin() ? "standin" : "cuda"; })
      .def_property_readonly("ordinal", [](Device& d) { return d.mapper->space.context.ordinal; })
      .def_property_readonly("page_size", [](Device& d) { return d.mapper->space.page_size; })
      .def_property_readonly(
          "budget", py::cpp_function([](Device& d) { return d.mapper->numbers().budget * d.mapper->space.page_size; },
                                     ReleaseGil()))
      .def_property_readonly("peer", [](Device& d) { return d.mapper->space.context.peer(); })
      .def_property_readonly("peer_refused", [](Device& d) { return d.mapper->space.context.peer_refused; })
      .def_property_readonly("host_refused", [](Device& d) { return d.mapper->space.context.host_refused; })
      .def_property_readonly("host_pages", [](Device& d) { return d.mapper->space.context.host_pages; })
      .def(
          "free_memory", [](Device& d) { return d.mapper->free_memory(); }, ReleaseGil())
      .def("set_budget", &set_budget, py::arg("nbytes"), py::arg("wait_ns") = 0)
      .def("snapshot", &snapshot)
      .def("memory_stats", &memory_stats)
      .def("memory_info", &Device::memory_info, ReleaseGil())
      .def("reset_peaks", &Device::reset_peaks, ReleaseGil())
      .def("reset_accumulated", &Device::reset_accumulated, ReleaseGil())
      .def_property("fraction", py::cpp_function(&Device::fraction, ReleaseGil()),
                    py::cpp_function(&Device::set_fraction, ReleaseGil()))
      .def("segments", &segments)
      .def(
          "checkpoint", [](Device& d, BallonetPool pool) { return d.heap.checkpoints.take(pool); }, py::arg("pool"),
          ReleaseGil())
      .def(
          "restore_checkpoint",
          [](Device& d, const Checkpoint& state) {
            const Checkpoints::Restored restored = d.heap.checkpoints.restore(state);
            return std::make_pair(addresses(restored.freed), addresses(restored.created));
          },
          py::arg("state"), ReleaseGil())
      .def("trim", &Device::trim, ReleaseGil())
      .def(
          "reap",
          [](Device& d, bool wait) {
            const std::size_t freed = d.mapper->reap(wait);
            if (wait) d.mapper->catch_up();
            return freed;
          },
          py::arg("wait") = false, ReleaseGil())
      .def("driver_ns", [](Device&) { return page_table_ns(); })
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
          py::arg("address"), ReleaseGil())
      .def(
          "begin_pool",
          [](Device& d, BallonetPool pool, std::optional<std::vector<std::uint64_t>> streams) {
            d.heap.pools.begin(pool, [streams = std::move(streams)](CUstream stream) {
              const auto handle = reinterpret_cast<std::uint64_t>(stream);
              return !streams || std::find(streams->begin(), streams->end(), handle) != streams->end();
            });
          },
          py::arg("pool"), py::arg("streams") = py::none(), ReleaseGil())
      .def(
          "end_pool", [](Device& d, BallonetPool pool) { d.heap.pools.end(pool); }, py::arg("pool"), ReleaseGil())
      .def(
          "release_pool", [](Device& d, BallonetPool pool) { d.heap.pools.release(pool); }, py::arg("pool"),
          ReleaseGil())
      .def("group", [](Device&) { return std::make_shared<Group>(); })
      .def(
          "reserve",
          [](const std::shared_ptr<Device>& d, std::size_t size, const std::string& owner, std::shared_ptr<Group> group,
             bool auto_retire, std::size_t expected, bool reuse, std::size_t more, bool keeps) {
            const std::size_t page = d->mapper->space.page_size;
            const auto pieces = [page](std::size_t bytes) { return bytes / page + (bytes % page != 0 ? 1 : 0); };
            const auto soon = reuse ? std::optional<std::size_t>(pieces(expected)) : std::nullopt;
            auto range =
                d->mapper->reserve(pieces(size), owner_named(owner), std::move(group), auto_retire, soon, more, keeps);
            return std::make_unique<RangeHandle>(d, std::move(range));
          },
          py::arg("nbytes"), py::arg("owner"), py::arg("group"), py::arg("auto_retire") = false, py::kw_only(),
          py::arg("expected") = 0, py::arg("reuse") = true, py::arg("more") = 0, py::arg("keeps") = false, ReleaseGil())
      .def(
          "note_stream", [](Device& d, std::uint64_t stream) { d.mapper->fences.note_stream(stream_at(stream)); },
          py::arg("stream"), ReleaseGil())
      .def(
          "note_use",
          [](Device& d, std::uint64_t address, std::size_t size, std::uint64_t stream, bool write) {
            d.mapper->fences.note_use(address, size, stream_at(stream), write);
          },
          py::arg("address"), py::arg("nbytes"), py::arg("stream"), py::arg("write"), ReleaseGil())
      .def(
          "synchronize", [](Device& d) { d.mapper->fences.synchronize(); }, ReleaseGil())
      .def(
          "stop_background", [](Device& d) { d.mapper->stop_background(); }, ReleaseGil())
      .def("timeline", &timeline)
      .def("events", &events)
      .def_static("on_spill", &on_spill, py::arg("tell"))
      .def("check", &Device::check, ReleaseGil())
      .def(
          "bind", [](const std::shared_ptr<Device>& d) { bind(d); }, ReleaseGil())
      .def(
          "unbind", [](const std::shared_ptr<Device>& d) { unbind(d); }, ReleaseGil())
      .def("close", &Device::close, ReleaseGil());
}

// The reclaim list of a device.

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
