#include "mapping/host_memory.h"

namespace ballonet {

HostMemory::HostMemory(std::shared_ptr<Mapper> mapper, const void* address, std::size_t size)
    : mapper_(std::move(mapper)), address_(address), size_(size) {
  mapper_->copies.register_host(address_, size_);
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
  mapper_->copies.unregister_host(address_);
  closed_ = true;
}

}  // namespace ballonet
