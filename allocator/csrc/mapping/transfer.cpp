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

}  // namespace ballonet
