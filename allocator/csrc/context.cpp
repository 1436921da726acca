#include "context.h"

#include <algorithm>

namespace ballonet {
namespace {

int attribute(const Driver& driver, int which, CUdevice device) {
  int value = 0;
  // A driver that does not know an attribute does not have what it stands for.
  return driver.cuDeviceGetAttribute(&value, which, device).ok() ? value : 0;
}

}  // namespace

Context::Context(const Driver& driver_, int ordinal, std::size_t page_size_, const BallonetStandinConfig& standin,
                 std::optional<int> peer, bool wants_host_pages)
    : driver(driver_), page_size(page_size_) {
  driver.configure(standin);
  driver.cuInit(0U).or_throw("starting the driver");
  driver.cuDeviceGet(&device, ordinal).or_throw(format("looking for device %d", ordinal));
  if (attribute(driver, cuda::kAttributeVirtualMemory, device) == 0) {
    throw DriverUnavailable(
        format("device %d cannot map memory (cuMemMap): ballonet cannot run on it. Some virtual GPUs and "
               "WSL2 set-ups refuse this; use torch's own allocator there",
               ordinal));
  }
  driver.cuDeviceTotalMem(&total_memory, device).or_throw("reading the device's size");
  device_place.type = cuda::kAllocationPinned;
  device_place.requestedHandleTypes =
      attribute(driver, cuda::kAttributePosixFd, device) != 0 ? cuda::kHandlePosixFd : cuda::kHandleNone;
  device_place.location = {cuda::kLocationDevice, device};
  host_place = device_place;
  host_place.location = {cuda::kLocationHostNuma, std::max(0, attribute(driver, cuda::kAttributeHostNumaId, device))};
  host_pages = wants_host_pages && attribute(driver, cuda::kAttributeHostNumaVirtualMemory, device) != 0;
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
    if (peer) open_peer(*peer);
  } catch (...) {
    driver.cuDevicePrimaryCtxRelease(device);
    throw;
  }
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
      peer_place.requestedHandleTypes =
          attribute(driver, cuda::kAttributePosixFd, there) != 0 ? cuda::kHandlePosixFd : cuda::kHandleNone;
      peer_place.location = {cuda::kLocationDevice, there};
      std::size_t granularity = 0;
      driver.cuMemGetAllocationGranularity(&granularity, &peer_place, cuda::kGranularityMinimum).or_throw();
      if (page_size % granularity != 0) {
        throw DriverUnavailable(format("pages of device %d are multiples of %s", there, in_units(granularity).c_str()));
      }
    }
    try_peer();
    peer_pages = true;
  } catch (const std::runtime_error& error) {
    peer_refused = error.what();
  }
}

// One page is created, opened and given back; what cannot be is given back as far as it goes.
void Context::try_peer() {
  CUmemGenericAllocationHandle handle = 0;
  auto made = driver.cuMemCreate(&handle, page_size, &peer_place, 0ULL);
  if (!made.ok() && made.code() != cuda::kOutOfMemory && peer_place.requestedHandleTypes != cuda::kHandleNone) {
    peer_place.requestedHandleTypes = cuda::kHandleNone;  // as in Pool::create_one
    made = driver.cuMemCreate(&handle, page_size, &peer_place, 0ULL);
  }
  made.or_throw("creating a page of the peer");
  const auto mapped = driver.cuMemMap(scratch, page_size, std::size_t{0}, handle, 0ULL);
  const auto opened = mapped.ok() ? driver.cuMemSetAccess(scratch, page_size, access.data(), std::size_t{1}) : mapped;
  if (mapped.ok() && !driver.cuMemUnmap(scratch, page_size).ok()) driver.cuMemUnmap(scratch, page_size);
  if (!driver.cuMemRelease(handle).ok()) driver.cuMemRelease(handle);
  opened.or_throw("opening a page of the peer");
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
