#include "mapping/moves.h"

namespace ballonet {

Moves::Moves(AddressSpace& space, Fences& fences, Retirement& retirement, Mapping& mapping, Copies& copies)
    : space_(space),
      fences_(fences),
      retirement_(retirement),
      mapping_(mapping),
      copies_(copies),
      scratch_(space.context.scratch, 1) {}

bool Moves::clear_scratch() {
  if (scratch_[0].page == kNoPage) return true;
  // No fence covers it.
  if (!space_.driver.cuStreamSynchronize(space_.context.copy_stream).ok()) return false;
  return space_.vacate(scratch_, 0);
}

bool Moves::move(Range& range, std::size_t index, Place to) {
  std::unique_lock<std::mutex> lease;
  if (!range.may_change(lease)) return false;
  if (to == Place::kHost && !space_.context.host_pages) return false;
  const auto movable = [&] {
    range.check_span(index, 1);
    const Piece& piece = range.addresses[index];
    return has_own_page(piece.leads_to) && !piece.doomed && space_.pool(piece.place).book.mappings(piece.page) == 1;
  };
  const std::lock_guard<std::mutex> one_at_a_time(mutex_);
  Section in(space_);
  if (!movable()) return false;
  if (to == Place::kHost) space_.prepare(in, to, 1);
  // Copies are submitted without the lock: one that begins after the streams have passed may use the page.
  const std::uint64_t submitted = copies_.submitted();
  const auto copies_began = [&] { return copies_.submitting() || copies_.submitted() != submitted; };
  if (!fences_.quiesce(in) || copies_began()) return false;
  retirement_.reap(in);
  if (!movable()) return false;
  const Piece before = range.addresses[index];
  if (!clear_scratch() || space_.pool(to).available() == 0) return false;
  Target fresh{kNoPage, own_page_in(to), to};
  try {
    fresh.page = mapping_.take(in, to, 1, range.owner).front();
  } catch (const PoolExhausted&) {
    return false;
  }
  fill(in, space_.address(range.addresses, index), fresh);
  const Piece& now = range.addresses[index];
  if (range.closed || now.changed != before.changed || now.page != before.page || now.place != before.place ||
      now.doomed || copies_began()) {
    space_.discard(to, fresh.page);  // another thread has retired it meanwhile
    return false;
  }
  exchange_pages(space_, {{range, index, {fresh}, true}});
  copies_.count(range.owner, before.place, to, space_.page_size);
  return true;
}

// Copies what is behind an address to a page that is behind none, and waits for that without the lock. Throws
// DriverError; the page is given back, at the latest with the next move.
void Moves::fill(Section& in, CUdeviceptr from, const Target& fresh) {
  const CUstream stream = space_.context.copy_stream;
  try {
    space_.map(scratch_, 0, fresh);
    space_.open(scratch_, 0, 1);
    space_.driver.cuMemcpyAsync(scratch_.base, from, space_.page_size, stream).or_throw("copying a page");
    {
      Unlocked unlocked(in.lock);
      space_.driver.cuStreamSynchronize(stream).or_throw("waiting for the copy of a page");
    }
    if (clear_scratch()) return;
    throw DriverError("cuMemUnmap", cuda::kOperatingSystem, "a failure", "clearing the addresses of a page's copy");
  } catch (...) {
    space_.pool(fresh.place).book.relabel(fresh.page, Owner::kRetiring);
    if (clear_scratch()) space_.release(fresh.place, fresh.page);
    throw;
  }
}

}  // namespace ballonet
