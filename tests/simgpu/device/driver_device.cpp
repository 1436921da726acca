// What the simulated devices say of themselves: about what an A100 says.
#include <cstdio>
#include <cstring>

#include "results.h"
#include "state.h"

using namespace simgpu;

namespace {

// What torch and ballonet ask for; anything else is 0.
constexpr struct {
  int attribute, value;
} kAttributes[] = {
    {1, 1024},  {2, 1024}, {3, 1024},        {4, 64},     {5, 2147483647}, {6, 65535},   {7, 65535},  {8, 49152},
    {9, 65536}, {10, 32},  {11, 2147483647}, {12, 65536}, {13, 1410000},   {14, 512},    {16, 108},   {19, 1},
    {31, 1},    {33, 1},   {36, 1215000},    {37, 5120},  {38, 41943040},  {39, 2048},   {40, 3},     {41, 1},
    {75, 8},    {76, 0},   {78, 1},          {79, 1},     {80, 1},         {81, 167936}, {82, 65536}, {83, 1},
    {89, 1},    {91, 1},   {95, 1},          {96, 1},     {97, 166912},    {98, 1},      {99, 1},     {100, 1},
    {102, 1},   {103, 1},  {106, 32},        {111, 1024}, {113, 1},        {134, 0},     {141, 1},
};

}  // namespace

CUresult cuDriverGetVersion(int* version) {
  *version = 13020;
  return cuda::kSuccess;
}

CUresult cuDeviceGetCount(int* count) {
  return enter(Needs::kInit, "cuDeviceGetCount", [&](State& all, auto&) {
    *count = all.config.devices;
    return CUresult{cuda::kSuccess};
  });
}

namespace {

template <class Body>
CUresult on_device(CUdevice device, const char* function, Body body) {
  return enter(Needs::kInit, function, [&](State& all, auto&) {
    if (device < 0 || device >= all.config.devices)
      return refuse(cuda::kInvalidDevice, "%s: there is no device %d", function, device);
    body(all);
    return CUresult{cuda::kSuccess};
  });
}

}  // namespace

CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  return on_device(ordinal, "cuDeviceGet", [&](State&) { *device = ordinal; });
}

CUresult cuDeviceGetName(char* name, int length, CUdevice device) {
  return on_device(device, "cuDeviceGetName", [&](State&) {
    if (length > 0) std::snprintf(name, static_cast<std::size_t>(length), "ballonet simulated device");
  });
}

CUresult cuDeviceGetAttribute(int* value, int attribute, CUdevice device) {
  return on_device(device, "cuDeviceGetAttribute", [&](State&) {
    *value = 0;
    for (const auto& known : kAttributes) {
      if (known.attribute == attribute) *value = known.value;
    }
    if (attribute == 34) *value = device + 1;  // PCI device
  });
}

CUresult cuDeviceCanAccessPeer(int* can, CUdevice device, CUdevice peer) {
  return on_device(device, "cuDeviceCanAccessPeer",
                   [&](State& all) { *can = peer >= 0 && peer < all.config.devices && peer != device; });
}

CUresult cuDeviceTotalMem(std::size_t* bytes, CUdevice device) {
  return on_device(device, "cuDeviceTotalMem",
                   [&](State& all) { *bytes = all.memory.limit(device == 0 ? Store::kDevice : Store::kPeer); });
}

CUresult cuGetErrorName(CUresult result, const char** name) {
  return ballonet::standin::result_name(result, name) ? CUresult{cuda::kSuccess} : CUresult{cuda::kInvalidValue};
}

CUresult cuGetErrorString(CUresult result, const char** text) {
  return ballonet::standin::result_text(result, text) ? CUresult{cuda::kSuccess} : CUresult{cuda::kInvalidValue};
}

#define SIMGPU_REFUSE(name) \
  CUresult name() { return refuse(cuda::kNotSupported, #name ": the simulated device runs no kernel of a GPU"); }
SIMGPU_UNSUPPORTED_FUNCTIONS(SIMGPU_REFUSE)
