#include "mapping/address_space.h"

#include <algorithm>
#include <cassert>
#include <map>

#include "base/fork.h"

namespace ballonet {

AddressSpace::AddressSpace(const Options& options)
    : page_size(options.page_size),
      driver(options.library),
      context(driver, options.ordinal, options.page_size, options.standin, options.peer, options.host_pages),
      device(driver, context.device_place, options.page_size, options.budget, &journal),
      host(driver, context.host_place, options.page_size, options.host_budget, nullptr),
      peer(driver, context.peer_place, options.page_size, context.peer_pages ? options.peer_budget : 0, nullptr) {
  watch_forks(options.library);
}

AddressSpace::~AddressSpace() {
  DriverScope scope(driver, context.handle);
  for (Pool* each : {&device, &host, &peer}) each->release_free();
}

Stretch AddressSpace::reserve(std::size_t pieces) const {
  // Pages begin at multiples of their size where that is an alignment and the driver gives it.
  const std::size_t alignment = (page_size & (page_size - 1)) == 0 ? page_size : 0;
  const std::size_t size = pieces * page_size;
  CUdeviceptr base = 0;
  auto reserved = driver.cuMemAddressReserve(&base, size, alignment, CUdeviceptr{0}, 0ULL);
  const bool refused = reserved.code() == cuda::kInvalidValue || reserved.code() == cuda::kNotSupported;
  if (refused) reserved = driver.cuMemAddressReserve(&base, size, std::size_t{0}, CUdeviceptr{0}, 0ULL);
  reserved.or_throw(format("reserving %s of addresses", in_units(size).c_str()));
  return {base, pieces};
}

void AddressSpace::free(Stretch& stretch) const {
  assert(mutex.held() && !stretch.in_use() && stretch.kept() == 0);
  const std::size_t size = stretch.pieces * page_size;
  if (size == 0) return;
  // Addresses that the driver does not take back are lost as addresses only; no memory is behind them.
  if (!driver.cuMemAddressFree(stretch.base, size).ok()) driver.cuMemAddressFree(stretch.base, size);
  stretch = {};
}

void AddressSpace::map(Stretch& stretch, std::size_t piece, const Target& target) {
  assert(mutex.held());
  Pool& from = pool(target.place);
  driver.cuMemMap(address(stretch, piece), page_size, std::size_t{0}, from.book.handle(target.page), 0ULL)
      .or_throw(format("mapping page %u", target.page));
  ++from.book.mappings(target.page);
  table.lead(stretch, piece, target);
}

void AddressSpace::open(Stretch& stretch, std::size_t first, std::size_t count) {
  assert(mutex.held());
  context.open_page(address(stretch, first), count * page_size, stretch[first].place == Place::kHost);
  for (std::size_t i = first; i < first + count; ++i) table.open(stretch, i);
}

void AddressSpace::unmap(Stretch& stretch, std::size_t piece) {
  assert(mutex.held());
  driver.cuMemUnmap(address(stretch, piece), page_size).or_throw("taking a page from its address");
  --pool(stretch[piece].place).book.mappings(stretch[piece].page);
  table.clear(stretch, piece);
}

bool AddressSpace::vacate(Stretch& stretch, std::size_t piece) {
  assert(mutex.held());
  if (!driver.cuMemUnmap(address(stretch, piece), page_size).ok()) return false;
  const Target before = stretch[piece];
  table.clear(stretch, piece);
  --pool(before.place).book.mappings(before.page);
  before.leads_to == LeadsTo::kKept ? device.give(before.page) : release(before.place, before.page);
  return true;
}

void AddressSpace::vacate_kept(Stretch& stretch, std::size_t piece) {
  if (vacate(stretch, piece) || vacate(stretch, piece)) return;
  throw DriverError("cuMemUnmap", cuda::kOperatingSystem, "a failure", "taking a page that was kept from its address");
}

bool AddressSpace::retire(Stretch& stretch, std::size_t piece, std::uint32_t ticket) {
  assert(mutex.held());
  const Target before = stretch[piece];
  if (!table.retire(stretch, piece, ticket)) return false;
  if (before.leads_to != LeadsTo::kAlias) pool(before.place).book.relabel(before.page, Owner::kRetiring);
  return true;
}

void AddressSpace::revive(Stretch& stretch, std::size_t piece, Owner owner) {
  table.revive(stretch, piece);
  pool(stretch[piece].place).book.relabel(stretch[piece].page, owner);
}

void AddressSpace::keep(Stretch& stretch, std::size_t piece, bool ahead) {
  assert(mutex.held());
  table.keep(stretch, piece, ahead);
  device.book.keep(stretch[piece].page);
}

void AddressSpace::claim(Stretch& stretch, std::size_t piece, Owner owner) {
  table.claim(stretch, piece);
  device.book.claim(stretch[piece].page, owner);
}

void AddressSpace::discard(Place place, PageId page) {
  pool(place).book.relabel(page, Owner::kRetiring);
  release(place, page);
}

void AddressSpace::release(Place place, PageId page) {
  Pool& from = pool(place);
  if (from.book.owner(page) == Owner::kRetiring && from.book.mappings(page) == 0) from.give(page);
}

void AddressSpace::prepare(Section& in, Place place, std::size_t pages) {
  Pool& from = pool(place);
  if (from.book.idle() >= pages || from.available() < pages) return;
  Pool::Creation creation = from.begin_creating(pages - from.book.idle());
  {
    Unlocked unlocked(in.lock);
    from.create(creation);
  }
  from.end_creating(creation);
}

AddressSpace::DevicePages AddressSpace::device_pages() const {
  const std::lock_guard lock(mutex);
  std::vector<Owned> runs;
  for (const Range* range : ranges) {  // closed ones, too: tensors may still lie over their pages
    if (range->owner == Owner::kActivations) continue;
    bool open = false;
    for (std::size_t i = 0; i < range->addresses.size() && i < range->pieces; ++i) {
      const bool ours = range->addresses[i].leads_to == LeadsTo::kDevice;
      if (ours && !open) runs.push_back({address(range->addresses, i), 0, range->owner});
      if (ours) runs.back().size += page_size;
      open = ours;
    }
  }
  return {runs, device.book.counts()};
}

const Range* AddressSpace::range_at(CUdeviceptr at) const {
  assert(mutex.held());
  const auto covers = [&](const Range* range) {
    return range->addresses.pieces > 0 && at >= range->base && at - range->base < range->pieces * page_size;
  };
  const auto found = std::find_if(ranges.begin(), ranges.end(), covers);
  return found == ranges.end() ? nullptr : *found;
}

void AddressSpace::check(const std::vector<const Stretch*>& others) {
  assert(mutex.held());
  for (const Pool* each : {&device, &host, &peer}) each->book.check();
  std::map<std::pair<Pool*, PageId>, std::pair<unsigned, unsigned>> seen;  // mappings, and those that own the page
  std::set<PageId> kept;
  std::size_t ahead = 0;
  const auto look = [&](const Stretch& stretch, std::optional<Owner> owner) {
    PageTable::check(stretch);
    ahead += stretch.ahead();
    for (std::size_t i = 0; i < stretch.size(); ++i) {
      const Piece& piece = stretch[i];
      if (piece.leads_to == LeadsTo::kNone) continue;
      if (piece.leads_to == LeadsTo::kKept) {  // that it is mapped once is in the pool's book
        if (!kept.insert(piece.page).second || !device.book.kept(piece.page))
          throw InvariantBroken(format("page %u is not kept as a piece says", piece.page));
        continue;
      }
      Pool& from = pool(piece.place);
      auto& [mappings, owners] = seen[{&from, piece.page}];
      ++mappings;
      const bool retiring = piece.leads_to == LeadsTo::kRetiring;
      if ((retiring ? piece.retiring_from : piece.leads_to) == LeadsTo::kAlias) continue;
      ++owners;
      if (owner && from.book.owner(piece.page) != (retiring ? Owner::kRetiring : *owner))
        throw InvariantBroken(format("page %u behind piece %zu has another owner than its range", piece.page, i));
    }
  };
  for (const Range* range : ranges) look(range->addresses, range->owner);
  for (const Stretch* other : others) look(*other, {});
  if (kept.size() != device.book.kept() || ahead != table.ahead())
    throw InvariantBroken("the pages that are kept do not add up");
  std::map<Pool*, std::size_t> used;
  for (const auto& [key, counts] : seen) {
    const auto& [from, page] = key;
    ++used[from];
    if (from->book.mappings(page) != counts.first) {
      throw InvariantBroken(
          format("page %u is mapped %u times, its book says %u", page, counts.first, from->book.mappings(page)));
    }
    if (counts.second > 1)
      throw InvariantBroken(format("page %u is behind %u pieces that own it", page, counts.second));
  }
  for (Pool* each : {&device, &host, &peer}) {
    const std::size_t owned = each->book.created() - each->book.count(Owner::kFree);
    if (owned != used[each])
      throw InvariantBroken(format("%zu pages have an owner, %zu are behind an address", owned, used[each]));
  }
}

}  // namespace ballonet
