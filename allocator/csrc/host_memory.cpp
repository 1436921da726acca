#include "host_memory.h"

namespace ballonet {

void Mapper::register_host(const void* memory, std::size_t size) {
  DriverScope scope(driver_, context_.handle);
  driver_.cuMemHostRegister(const_cast<void*>(memory), size, cuda::kRegisterReadOnly)
      .or_throw(format("registering %s of host memory to copy from", in_units(size).c_str()));
  std::lock_guard<std::mutex> lock(mutex);
  registered_[reinterpret_cast<CUdeviceptr>(memory)] = size;
}

// Nothing is taken from it any more, and copies that were submitted are waited for, on streams that are never captured:
// that breaks no capture. What came of them is told to whoever waits for their end.
void Mapper::unregister_host(const void* memory) {
  DriverScope scope(driver_, context_.handle);
  Lock lock(mutex);
  const auto entry = registered_.extract(reinterpret_cast<CUdeviceptr>(memory));
  const CUstream streams[] = {to_device_, from_device_, context_.copy_stream};
  CUresult done;
  {
    Unlocked unlocked(lock);
    for (CUstream stream : streams) {
      if (stream != nullptr) driver_.cuStreamSynchronize(stream);
    }
    done = driver_.cuMemHostUnregister(const_cast<void*>(memory)).code();
  }
  if (done != cuda::kSuccess && entry) registered_[entry.key()] = entry.mapped();
  driver_.judge(Fn::cuMemHostUnregister, done).or_throw("unregistering host memory");
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
