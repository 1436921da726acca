#include "mapping/range.h"

#include <utility>

#include "mapping/mapper.h"

namespace ballonet {

Range::Range(std::shared_ptr<Mapper> mapper_, Stretch addresses_, std::size_t pieces_, Owner owner_,
             std::shared_ptr<Group> group_, bool auto_retire_, bool keeps_)
    : base(addresses_.base),
      pieces(pieces_),
      owner(owner_),
      group(std::move(group_)),
      auto_retire(auto_retire_),
      keeps(keeps_),
      mapper(std::move(mapper_)),
      addresses(std::move(addresses_)) {}

// Pre: nothing is mapped: `close` retired everything, and retirements and pins keep the range alive.
Range::~Range() { mapper->forget(*this); }

void Range::check_span(std::size_t first, std::size_t count) const {
  if (closed) throw UsageError("the range is closed");
  if (first > pieces || count > pieces - first) {
    throw UsageError(format("pieces %zu to %zu lie outside a range of %zu", first, first + count, pieces));
  }
}

bool Range::may_change(std::unique_lock<std::mutex>& lease) const {
  if (!group) return true;
  lease = std::unique_lock<std::mutex>(group->mutex);
  return !group->leased_by_others();
}

LeadsTo Range::leads_to(std::size_t piece) {
  const std::lock_guard lock(mapper->space.mutex);
  return addresses[piece].leads_to;
}

PageId Range::page(std::size_t piece) {
  const std::lock_guard lock(mapper->space.mutex);
  return addresses[piece].page;
}

std::optional<Place> Range::place(std::size_t piece) {
  const std::lock_guard lock(mapper->space.mutex);
  if (addresses[piece].page == kNoPage) return {};
  return addresses[piece].place;
}

std::size_t Range::backed() {
  const std::lock_guard lock(mapper->space.mutex);
  return addresses.backed();
}

std::vector<std::tuple<std::size_t, std::size_t, LeadsTo>> Range::runs(std::size_t first, std::size_t count) {
  std::vector<std::tuple<std::size_t, std::size_t, LeadsTo>> found;
  const std::lock_guard lock(mapper->space.mutex);
  for (std::size_t piece = first; piece < first + count; ++piece) {
    const LeadsTo leads_to = addresses[piece].leads_to;
    if (found.empty() || std::get<2>(found.back()) != leads_to) found.emplace_back(piece, 0, leads_to);
    ++std::get<1>(found.back());
  }
  return found;
}

void Range::pin(std::size_t offset, std::size_t size) {
  AddressSpace& space = mapper->space;
  const std::lock_guard lock(space.mutex);
  if (size == 0) return;
  const std::size_t extent = pieces * space.page_size;
  if (offset > extent || size > extent - offset) {
    throw UsageError(format("%zu bytes at %zu lie outside a range of %zu bytes", size, offset, extent));
  }
  const std::size_t first = offset / space.page_size, last = (offset + size - 1) / space.page_size;
  check_span(first, last - first + 1);
  for (std::size_t i = first; i <= last; ++i) {
    if (!leads_somewhere(addresses[i].leads_to) || addresses[i].doomed) {
      throw UsageError(
          format("bytes %zu to %zu of the range are not all backed: map piece %zu first", offset, offset + size, i));
    }
    if (addresses[i].pins == 0xffff) throw UsageError("more than 65535 tensors lie over one page");
  }
  for (std::size_t i = first; i <= last; ++i) space.table.pin(addresses, i);
}

void Range::open_window() {
  const std::lock_guard lock(mapper->space.mutex);
  ++windows;
}

void Range::close_window() {
  const std::lock_guard lock(mapper->space.mutex);
  --windows;
  mapper->cached.keep_closed(*this);
}

void Range::unpin(std::size_t offset, std::size_t size) {
  AddressSpace& space = mapper->space;
  std::unique_lock lock(space.mutex);
  if (size == 0) return;
  if (group) ++group->unpinned;
  const std::size_t first = offset / space.page_size, last = (offset + size - 1) / space.page_size;
  Spans unused;
  for (std::size_t i = first; i <= last; ++i) {
    if (space.table.unpin(addresses, i) && (addresses[i].doomed || auto_retire)) unused.push_back({i, 1});
  }
  if (unused.empty()) return;
  Section in(space, std::move(lock));
  mapper->retirement.retire(*this, unused);
  mapper->retirement.reap_later(in);
}

}  // namespace ballonet
