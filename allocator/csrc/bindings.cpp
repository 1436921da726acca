// What Python sees of the core; `_native.pyi` documents it. Whatever can wait for a lock or a device releases the GIL
// first.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "host_memory.h"
#include "registry.h"
#include "replay.h"
#include "tensor.h"
#include "transfer.h"

namespace py = pybind11;

namespace ballonet {
namespace {

using ReleaseGil = py::call_guard<py::gil_scoped_release>;

Owner owner_named(const std::string& name) {
  if (name == "weights") return Owner::kWeights;
  if (name == "activations") return Owner::kActivations;
  if (name == "kv") return Owner::kKv;
  throw UsageError("an owner is 'weights', 'activations' or 'kv', not '" + name + "'");
}

Place place_named(const std::string& name) {
  if (name == "device") return Place::kDevice;
  if (name == "host") return Place::kHost;
  throw UsageError("a place is 'device' or 'host', not '" + name + "'");
}

const char* name_of(Owner owner) {
  constexpr const char* kNames[] = {"free", "weights", "activations", "kv", "retiring"};
  return kNames[static_cast<unsigned>(owner)];
}

const char* name_of(Backing backing) {
  constexpr const char* kNames[] = {"none", "device", "host", "alias", "retiring"};
  return kNames[static_cast<unsigned>(backing)];
}

// A range as Python holds it: collecting it closes it.
struct RangeHandle {
  RangeHandle(std::shared_ptr<Device> device_, std::shared_ptr<Range> range_)
      : device(std::move(device_)), range(std::move(range_)) {}
  ~RangeHandle() { range->mapper->close(*range); }
  RangeHandle(const RangeHandle&) = delete;
  RangeHandle& operator=(const RangeHandle&) = delete;

  Mapper& mapper() const { return *range->mapper; }

  std::shared_ptr<Device> device;
  std::shared_ptr<Range> range;
  bool closed = false;
};

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

void translate(std::exception_ptr thrown) {
  const auto raise = [](const char* name, auto... arguments) {
    const py::object type = py::module_::import("ballonet.allocator.errors").attr(name);
    const py::object error = type(arguments...);
    PyErr_SetObject(type.ptr(), error.ptr());
  };
  try {
    std::rethrow_exception(thrown);
  } catch (const DriverError& error) {
    raise("DriverError", error.function, error.code, error.name, error.detail);
  } catch (const DriverUnavailable& error) {
    raise("DriverUnavailable", std::string(error.what()));
  } catch (const PoolExhausted& error) {
    raise("PoolExhausted", std::string(error.what()));
  } catch (const InvariantBroken& error) {
    raise("InvariantBroken", std::string(error.what()));
  } catch (const UsageError& error) {
    raise("BallonetError", std::string(error.what()));
  }
}

py::dict probe(const std::string& library, int ordinal) {
  const Driver driver(library);
  driver.cuInit(0U).or_throw("starting the driver");
  py::dict facts;
  int version = 0, devices = 0;
  driver.cuDriverGetVersion(&version).or_throw();
  driver.cuDeviceGetCount(&devices).or_throw();
  facts["library"] = library;
  facts["kind"] = driver.is_standin() ? "standin" : "cuda";
  facts["driver_version"] = version;
  facts["devices"] = devices;
  if (ordinal >= devices) return facts;
  CUdevice device = 0;
  driver.cuDeviceGet(&device, ordinal).or_throw();
  char name[256] = "";
  driver.cuDeviceGetName(name, static_cast<int>(sizeof name), device).or_throw();
  std::size_t total = 0;
  driver.cuDeviceTotalMem(&total, device).or_throw();
  unsigned flags = 0;
  int active = 0;
  driver.cuDevicePrimaryCtxGetState(device, &flags, &active).or_throw();
  const auto has = [&](int attribute) {
    int value = 0;
    return driver.cuDeviceGetAttribute(&value, attribute, device).ok() && value != 0;
  };
  facts["name"] = std::string(name);
  facts["total_memory"] = total;
  facts["virtual_memory"] = has(cuda::kAttributeVirtualMemory);
  facts["host_pages"] = has(cuda::kAttributeHostNumaVirtualMemory);
  facts["posix_handles"] = has(cuda::kAttributePosixFd);
  facts["context_active"] = active != 0;
  return facts;
}

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
  result["host_budget"] = numbers.host_budget * page;
  result["copied"] = copied;
  result["driver_calls"] = calls;
  result["faults"] = faults_fired();
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

CUstream stream_at(std::uint64_t stream) { return reinterpret_cast<CUstream>(stream); }

void bind_device(py::module_& module) {
  py::class_<Device, std::shared_ptr<Device>>(module, "Device")
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

void bind_transfer(py::module_& module) {
  py::class_<Transfer::Done, std::shared_ptr<Transfer::Done>>(module, "Done")
      .def(
          "before", [](Transfer::Done& d, std::uint64_t stream) { d.before(stream_at(stream)); }, py::arg("stream"),
          ReleaseGil())
      .def("passed", &Transfer::Done::passed, ReleaseGil())
      .def("wait", &Transfer::Done::wait, ReleaseGil());

  py::class_<Transfer, std::shared_ptr<Transfer>>(module, "Transfer")
      .def(py::init([](const std::shared_ptr<Device>& d) { return std::make_shared<Transfer>(d->mapper); }),
           py::arg("device"))
      .def(
          "copy",
          [](Transfer& t, const std::vector<std::tuple<std::uint64_t, std::uint64_t, std::size_t>>& parts,
             std::uint64_t after, const std::string& owner, const std::string& to) {
            std::vector<Copy> copies;
            copies.reserve(parts.size());
            for (const auto& [target, source, size] : parts) copies.push_back({target, source, size});
            return t.copy(copies, stream_at(after), owner_named(owner), place_named(to));
          },
          py::arg("parts"), py::kw_only(), py::arg("after"), py::arg("owner"), py::arg("to"), ReleaseGil());
}

void bind_host_memory(py::module_& module) {
  py::class_<BufferHandle>(module, "HostMemory")
      .def(py::init<const std::shared_ptr<Device>&, const py::buffer&, std::size_t, std::size_t>(), py::arg("device"),
           py::arg("buffer"), py::arg("offset"), py::arg("nbytes"))
      .def_property_readonly("address",
                             [](BufferHandle& h) { return reinterpret_cast<std::uintptr_t>(h.memory->address()); })
      .def_property_readonly("nbytes", [](BufferHandle& h) { return h.memory->size(); })
      .def_property_readonly("closed", [](BufferHandle& h) { return h.memory->closed(); })
      .def("close", &BufferHandle::close);
}

py::dict replayed(Device& device, const py::bytes& ops) {
  const std::string_view rows = ops;
  Replayed result;
  {
    py::gil_scoped_release release;
    result = replay(device, rows);
  }
  py::dict numbers;
  numbers["peak_live"] = result.peak_live;
  numbers["peak_physical"] = result.peak_physical;
  numbers["driver_calls"] = result.driver_calls;
  numbers["ns_per_op"] = result.ns_per_op;
  numbers["ops"] = result.ops;
  return numbers;
}

}  // namespace
}  // namespace ballonet

extern "C" {
void* ballonet_plain_alloc(std::ptrdiff_t size, int device, void* stream);
void* ballonet_plain_segment(std::ptrdiff_t size, int device, void* stream);
void ballonet_plain_free(void* pointer, std::ptrdiff_t size, int device, void* stream);
void ballonet_plain_record_stream(void* pointer, void* stream);
void ballonet_plain_trim();
}

PYBIND11_MODULE(_native, module) {
  using namespace ballonet;
  py::register_exception_translator(&translate);
  bind_device(module);
  bind_range(module);
  bind_transfer(module);
  bind_host_memory(module);
  module.def("probe", &probe, py::arg("library"), py::arg("ordinal"));
  module.def("core_table", [] { return reinterpret_cast<std::uintptr_t>(core_table()); });
  module.def("entry_points", [] {
    py::dict points;
    points["alloc"] = reinterpret_cast<std::uintptr_t>(&ballonet_plain_alloc);
    points["segment"] = reinterpret_cast<std::uintptr_t>(&ballonet_plain_segment);
    points["free"] = reinterpret_cast<std::uintptr_t>(&ballonet_plain_free);
    points["record_stream"] = reinterpret_cast<std::uintptr_t>(&ballonet_plain_record_stream);
    points["trim"] = reinterpret_cast<std::uintptr_t>(&ballonet_plain_trim);
    return points;
  });
  module.def("bench_hit_path", &time_hit_path, py::arg("device"), py::arg("nbytes"), py::arg("rounds"), ReleaseGil());
  module.def("replay", &replayed, py::arg("device"), py::arg("ops"));
}
