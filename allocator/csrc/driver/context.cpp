#include "driver/context.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "base/tuning.h"

namespace ballonet {
namespace {

int attribute(const Driver& driver, int which, CUdevice device) {
  int value = 0;
  // A driver that does not know an attribute does not have what it stands for.
  return driver.cuDeviceGetAttribute(&value, which, device).ok() ? value : 0;
}

// Makes a call that gives something back until the driver obeys, a few times: what is kept here is lost for good.
template <class Call>
void insist(Call call) {
  for (int time = 0; time < tuning::kReleases && !call().ok(); ++time) {
  }
}

}  // namespace

bool ask_for_less(CUmemAllocationProp& place) {
  if (place.allocFlags.gpuDirectRDMACapable != 0) {
    place.allocFlags.gpuDirectRDMACapable = 0;
    return true;
  }
  return std::exchange(place.requestedHandleTypes, cuda::kHandleNone) != cuda::kHandleNone;
}

Context::Context(const Driver& driver_, int ordinal_, std::size_t page_size_, const BallonetStandinConfig& standin,
                 std::optional<int> peer, bool wants_host_pages)
    : driver(driver_), ordinal(ordinal_), page_size(page_size_) {
  driver.configure(standin);
  driver.start();
  driver.cuDeviceGet(&device, ordinal).or_throw(format("looking for device %d", ordinal));
  if (attribute(driver, cuda::kAttributeVirtualMemory, device) == 0) {
    throw DriverUnavailable(
        format("device %d cannot map memory (cuMemMap): ballonet cannot run on it. Some virtual GPUs and "
               "WSL2 set-ups refuse this; use torch's own allocator there",
               ordinal));
  }
  driver.cuDeviceTotalMem(&total_memory, device).or_throw("reading the device's size");
  place_pages(device_place, device);
  host_place.type = cuda::kAllocationPinned;
  host_place.requestedHandleTypes = device_place.requestedHandleTypes;
  host_place.location = {cuda::kLocationHostNuma, std::max(0, attribute(driver, cuda::kAttributeHostNumaId, device))};
  access[0] = {device_place.location, cuda::kAccessReadWrite};
  access[1] = {host_place.location, cuda::kAccessReadWrite};

  driver.cuDevicePrimaryCtxRetain(&handle, device).or_throw("opening the device's primary context");
  try {
    DriverScope scope(driver, handle);
    std::size_t granularity = 0;
    driver.cuMemGetAllocationGranularity(&granularity, &device_place, cuda::kGranularityMinimum).or_throw();
    if (page_size == 0 || page_size % granularity != 0) {
      throw UsageError(format("the page size must be a multiple of %s on this device, not %s",
                              in_units(granularity).c_str(), in_units(page_size).c_str()));
    }
    driver.cuStreamCreate(&copy_stream, cuda::kStreamNonBlocking).or_throw("creating the copy stream");
    const auto reserved = driver.cuMemAddressReserve(&scratch, page_size, std::size_t{0}, CUdeviceptr{0}, 0ULL);
    if (!reserved.ok()) driver.cuStreamDestroy(copy_stream);
    reserved.or_throw("reserving addresses for one page");
    open_host(wants_host_pages);
    if (peer) open_peer(*peer);
  } catch (...) {
    driver.cuDevicePrimaryCtxRelease(device);
    throw;
  }
}

void Context::place_pages(CUmemAllocationProp& place, CUdevice at) const {
  place.type = cuda::kAllocationPinned;
  place.requestedHandleTypes =
      attribute(driver, cuda::kAttributePosixFd, at) != 0 ? cuda::kHandlePosixFd : cuda::kHandleNone;
  place.allocFlags.gpuDirectRDMACapable = attribute(driver, cuda::kAttributeRdmaVirtualMemory, at) != 0 ? 1 : 0;
  place.location = {cuda::kLocationDevice, at};
}

void Context::check_granularity(const CUmemAllocationProp& place, const char* whose) const {
  std::size_t granularity = 0;
  driver.cuMemGetAllocationGranularity(&granularity, &place, cuda::kGranularityMinimum).or_throw();
  if (granularity != 0 && page_size % granularity == 0) return;
  throw DriverUnavailable(format("pages of %s are multiples of %s, not %s", whose, in_units(granularity).c_str(),
                                 in_units(page_size).c_str()));
}

// See Note [Host pages are tried].
void Context::open_host(bool wanted) {
  if (!wanted) {
    host_refused = "they are turned off (a host budget of 0, BALLONET_HOST_PAGES, or what a preflight found)";
    return;
  }
  if (attribute(driver, cuda::kAttributeHostNumaVirtualMemory, device) == 0) {
    host_refused = "the driver cannot map host memory at a device address on this device";
    return;
  }
  for (int attempt = 0; attempt < 2 && !host_pages;
       ++attempt) {  // a driver call that failed once deserves a second try
    try {
      check_granularity(host_place, "host memory");
      try_page(host_place, scratch, "host memory", [&](CUdeviceptr there) { copy_both_ways(there); });
      host_pages = true;
      host_refused.clear();
    } catch (const std::runtime_error& error) {
      host_refused = error.what();
    }
  }
}

// Bytes go from a page of the device to the page there, and back. Throws DriverError, DriverUnavailable.
void Context::copy_both_ways(CUdeviceptr there) {
  constexpr unsigned char kMark = 0x5a;
  CUdeviceptr addresses = 0;
  driver.cuMemAddressReserve(&addresses, page_size, std::size_t{0}, CUdeviceptr{0}, 0ULL).or_throw();
  unsigned char last = 0;
  try {
    try_page(device_place, addresses, "the device", [&](CUdeviceptr here) {
      try {
        driver.cuMemsetD8Async(here, kMark, page_size, copy_stream).or_throw("filling a page of the device");
        driver.cuMemcpyAsync(there, here, page_size, copy_stream).or_throw("copying to a page of host memory");
        driver.cuMemsetD8Async(here, static_cast<unsigned char>(0), page_size, copy_stream)
            .or_throw("clearing a page of the device");
        driver.cuMemcpyAsync(here, there, page_size, copy_stream).or_throw("copying from a page of host memory");
        driver.cuStreamSynchronize(copy_stream).or_throw("waiting for copies to and from host memory");
        driver.cuMemcpyDtoH(&last, here + page_size - 1, std::size_t{1}).or_throw("reading what was copied");
      } catch (...) {
        // Before the page goes, which cannot while something is to be written to it.
        insist([&] { return driver.cuStreamSynchronize(copy_stream); });
        throw;
      }
    });
  } catch (const DriverError& error) {
    driver.cuMemAddressFree(addresses, page_size);
    if (error.code == cuda::kOutOfMemory) return;  // the device is full: that says nothing of host memory
    throw;
  }
  driver.cuMemAddressFree(addresses, page_size);
  if (last != kMark) throw DriverUnavailable("copies to a page of host memory and back bring other bytes");
}

// See Note [Peer pages].
void Context::open_peer(int ordinal) {
  try {
    CUdevice there = 0;
    driver.cuDeviceGet(&there, ordinal).or_throw(format("looking for device %d", ordinal));
    peer_place = device_place;
    if (there != device) {
      int reachable = 0;
      driver.cuDeviceCanAccessPeer(&reachable, device, there).or_throw("asking for peer access");
      if (reachable == 0)
        throw DriverUnavailable(format("device %d cannot reach the memory of device %d", device, there));
      if (attribute(driver, cuda::kAttributeVirtualMemory, there) == 0)
        throw DriverUnavailable(format("device %d cannot map memory (cuMemMap)", there));
      place_pages(peer_place, there);
      check_granularity(peer_place, "the peer");
    }
    try_page(peer_place, scratch, "the peer", [](CUdeviceptr) {});
    peer_pages = true;
  } catch (const std::runtime_error& error) {
    peer_refused = error.what();
  }
}

// A page is created, mapped, opened, used and given back; what cannot be is given back as far as it goes. `place` is
// afterwards what the driver agreed to.
template <class Use>
void Context::try_page(CUmemAllocationProp& place, CUdeviceptr at, const char* whose, Use use) {
  CUmemGenericAllocationHandle handle = 0;
  auto made = driver.cuMemCreate(&handle, page_size, &place, 0ULL);
  while (!made.ok() && made.code() != cuda::kOutOfMemory && ask_for_less(place)) {
    made = driver.cuMemCreate(&handle, page_size, &place, 0ULL);
  }
  made.or_throw(format("creating a page of %s", whose));
  std::exception_ptr failed;
  bool mapped = false;
  try {
    driver.cuMemMap(at, page_size, std::size_t{0}, handle, 0ULL).or_throw(format("mapping a page of %s", whose));
    mapped = true;
    open_page(at, page_size, place.location.type == cuda::kLocationHostNuma);
    use(at);
  } catch (...) {
    failed = std::current_exception();
  }
  if (mapped) insist([&] { return driver.cuMemUnmap(at, page_size); });
  insist([&] { return driver.cuMemRelease(handle); });
  if (failed) std::rethrow_exception(failed);
}

void Context::open_page(CUdeviceptr at, std::size_t size, bool host) const {
  const std::size_t count = host ? 2 : 1;
  auto opened = driver.cuMemSetAccess(at, size, access.data(), count);
  // A driver that does not open it for the CPU copies there without the CPU.
  const bool refused = opened.code() == cuda::kInvalidValue || opened.code() == cuda::kNotSupported;
  if (refused && count > 1) opened = driver.cuMemSetAccess(at, size, access.data(), std::size_t{1});
  opened.or_throw(format("opening %s of pages", in_units(size).c_str()));
}

Context::~Context() {
  {
    DriverScope scope(driver, handle);
    driver.cuMemAddressFree(scratch, page_size);
    driver.cuStreamDestroy(copy_stream);
  }
  driver.cuDevicePrimaryCtxRelease(device);
}

}  // namespace ballonet
