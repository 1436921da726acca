// Physical memory and addresses as the driver's functions take them: the arguments are checked here, the work is done
// in mappings.cpp. It uses no streams; the owner of a Memory holds a lock around it.
//
// Lock: the stand-in's (state.h), held by the caller.
#pragma once

#include <cstddef>
#include <cstdint>

#include "mappings.h"

namespace ballonet::standin {

constexpr int kDevices = 2;
constexpr CUdevice kPeerDevice = 1;
constexpr std::uint64_t kUnlimited = ~0ull;

Store store_of(const CUmemLocation& location);

class Memory {
 public:
  using Flags = unsigned long long;

  CUresult granularity(std::size_t* bytes, const CUmemAllocationProp& wanted, int option) const;
  CUresult reserve(CUdeviceptr* address, std::size_t size, std::size_t alignment, CUdeviceptr hint, Flags flags);
  CUresult create(CUmemGenericAllocationHandle* handle, std::size_t size, const CUmemAllocationProp& wanted,
                  Flags flags);
  CUresult map(CUdeviceptr address, std::size_t size, std::size_t offset, CUmemGenericAllocationHandle handle,
               Flags flags);
  CUresult set_access(CUdeviceptr address, std::size_t size, const CUmemAccessDesc* wanted, std::size_t count);

  std::uint64_t limit(Store store) const { return limits[static_cast<int>(store)]; }
  std::uint64_t available(Store store) const;  // bytes that may still be made

  Mappings mappings;
  std::uint64_t page = kGranularity;                            // what sizes are a multiple of
  int computing = 1;                                            // devices that access can be given to, from 0
  std::uint64_t limits[kStores] = {0, kUnlimited, kUnlimited};  // bytes that may exist, by Store

 private:
  CUresult check_size(std::uint64_t size, const char* function) const;
};

}  // namespace ballonet::standin
