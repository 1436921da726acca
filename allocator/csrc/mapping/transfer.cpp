#include "mapping/transfer.h"

namespace ballonet {

Transfer::Transfer(std::shared_ptr<Mapper> mapper) : mapper_(std::move(mapper)) { mapper_->copies.open_streams(); }

std::shared_ptr<Transfer::Done> Transfer::copy(const std::vector<Copy>& parts, std::optional<CUstream> after,
                                               Owner owner, Place to) {
  return std::make_shared<Done>(shared_from_this(), mapper_->copies.submit(parts, after, owner, to));
}

Transfer::Done::~Done() { transfer_->mapper_->fences.recycle(fence_); }

void Transfer::Done::before(CUstream stream) { transfer_->mapper_->fences.before(stream, fence_); }

bool Transfer::Done::passed() { return transfer_->mapper_->fences.passed(fence_); }

void Transfer::Done::wait() { transfer_->mapper_->fences.wait(fence_); }

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
