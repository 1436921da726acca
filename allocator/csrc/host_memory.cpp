#include "host_memory.h"

namespace ballonet {

void Mapper::register_host(const void* memory, std::size_t size) {
  DriverScope scope(driver_, context_.handle);
  driver_.cuMemHostRegister(const_cast<void*>(memory), size, cuda::kRegisterReadOnly)
      .or_throw(format("registering %s of host memory to copy from", in_units(size).c_str()));
  std::lock_guard<std::mutex> lock(mutex);
  registered_[reinterpret_cast<CUdeviceptr>(memory)] = size;
}

// Copies run on streams that `create_stream` made, which are never captured: waiting for them breaks no capture. What
// came of them is told to whoever waits for their end.
void Mapper::unregister_host(const void* memory) {
  std::lock_guard<std::mutex> lock(mutex);
  DriverScope scope(driver_, context_.handle);
  for (CUstream stream : made_) driver_.cuStreamSynchronize(stream);
  driver_.cuMemHostUnregister(const_cast<void*>(memory)).or_throw("unregistering host memory");
  registered_.erase(reinterpret_cast<CUdeviceptr>(memory));
}

// Pre: the caller holds `mutex`. The bytes lie in one registration.
bool Mapper::registered(CUdeviceptr address, std::size_t size) const {
  auto found = registered_.upper_bound(address);
  if (found == registered_.begin()) return false;
  --found;
  const std::size_t offset = address - found->first;
  return offset <= found->second && size <= found->second - offset;
}

HostMemory::HostMemory(std::shared_ptr<Mapper> mapper, const void* address, std::size_t size)
    : mapper_(std::move(mapper)), address_(address), size_(size) {
  mapper_->register_host(address_, size_);
}

HostMemory::~HostMemory() { let_go(); }

bool HostMemory::let_go() noexcept {
  for (int attempt = 0; attempt < 4 && !closed_; ++attempt) {
    try {
      close();
    } catch (const DriverError&) {
      continue;
    }
  }
  return closed_;
}

void HostMemory::close() {
  if (closed_) return;
  mapper_->unregister_host(address_);
  closed_ = true;
}

}  // namespace ballonet
