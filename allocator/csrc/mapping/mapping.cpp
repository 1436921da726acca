#include "mapping/mapping.h"

#include <algorithm>
#include <cassert>
#include <exception>
#include <set>
#include <utility>

#include "base/tuning.h"

namespace ballonet {

namespace {

struct Swap {
  Range& range;
  std::size_t piece;
  Target before, after;
  std::uint64_t changed;
  bool same_bytes;
};

// While it lives, what is added can be read although its pages are exchanged.
class Readable {
 public:
  explicit Readable(const AddressSpace& space) : space_(space) {}
  ~Readable() {
    for (CUdeviceptr address : addresses_) space_.driver.hold(address, space_.page_size, false);
  }
  Readable(const Readable&) = delete;
  Readable& operator=(const Readable&) = delete;
  void add(CUdeviceptr address) {
    addresses_.push_back(address);
    space_.driver.hold(address, space_.page_size, true);
  }

 private:
  const AddressSpace& space_;
  std::vector<CUdeviceptr> addresses_;
};

// Maps a page at the piece, instead of the one that is there; or none.
void show(AddressSpace& space, Stretch& addresses, std::size_t piece, const Target& target) {
  if (addresses[piece].page != kNoPage) space.unmap(addresses, piece);
  if (target.page != kNoPage) space.map(addresses, piece, target);
}

void show_again(AddressSpace& space, const Swap& swap) {
  Stretch& addresses = swap.range.addresses;
  const Piece& now = addresses[swap.piece];
  for (int attempt = 0; attempt < tuning::kPutBack; ++attempt) {
    try {
      if (now.page != swap.before.page || now.place != swap.before.place)
        show(space, addresses, swap.piece, swap.before);
      if (now.page != kNoPage && !now.open) space.open(addresses, swap.piece, 1);
      return;
    } catch (const DriverError&) {
      continue;
    }
  }
}

// Access for neighbours at once, as far as they lead to one place.
void open(AddressSpace& space, const Change& change) {
  const std::vector<Target>& targets = change.targets;
  for (std::size_t from = 0, to = 0; from < targets.size(); from = to) {
    const auto alike = [&](const Target& target) {
      return target.place == targets[from].place && (target.page == kNoPage) == (targets[from].page == kNoPage);
    };
    while (to < targets.size() && alike(targets[to])) ++to;
    if (targets[from].page != kNoPage) space.open(change.range.addresses, change.first + from, to - from);
  }
}

// Frees what is behind no piece that owns it.
void free_unowned(AddressSpace& space, const std::vector<Swap>& swaps) {
  std::set<std::pair<Place, PageId>> owned;
  for (const Swap& swap : swaps) {
    const Piece& piece = swap.range.addresses[swap.piece];
    if (has_own_page(piece.leads_to)) owned.insert({piece.place, piece.page});
  }
  for (const Swap& swap : swaps) {
    for (const Target& side : {swap.before, swap.after}) {
      if (side.page == kNoPage || owned.count({side.place, side.page}) > 0) continue;
      // An alias's is free where its own range was closed meanwhile.
      side.leads_to == LeadsTo::kAlias ? space.release(side.place, side.page) : space.discard(side.place, side.page);
    }
  }
}

}  // namespace

void exchange_pages(AddressSpace& space, const std::vector<Change>& changes) {
  std::vector<Swap> swaps;
  Readable readable(space);
  for (const Change& change : changes) {
    for (std::size_t i = 0; i < change.targets.size(); ++i) {
      const Piece& piece = change.range.addresses[change.first + i];
      swaps.push_back({change.range, change.first + i, piece, change.targets[i], piece.changed, change.same_bytes});
      if (change.targets[i].page != kNoPage) readable.add(space.address(change.range.addresses, change.first + i));
    }
  }
  std::size_t reached = 0;
  std::exception_ptr failed;
  try {
    for (; reached < swaps.size(); ++reached) {
      show(space, swaps[reached].range.addresses, swaps[reached].piece, swaps[reached].after);
    }
    for (const Change& change : changes) open(space, change);
  } catch (...) {
    failed = std::current_exception();
    for (std::size_t i = 0; i < std::min(reached + 1, swaps.size()); ++i) show_again(space, swaps[i]);
  }
  for (const Swap& swap : swaps) {
    Stretch& addresses = swap.range.addresses;
    if (swap.same_bytes && addresses[swap.piece].page != kNoPage)
      space.table.unchanged_since(addresses, swap.piece, swap.changed);
  }
  free_unowned(space, swaps);
  if (failed) std::rethrow_exception(failed);
}

void Mapping::prepare_host(std::size_t pages) {
  if (!space_.context.host_pages) return;
  Section in(space_);
  space_.prepare(in, Place::kHost, pages);
}

void Mapping::map(Section& in, Range& range, std::size_t first, std::size_t count, Place place, bool wait) {
  range.check_span(first, count);
  if (place == Place::kHost && !space_.context.host_pages) {
    throw PoolExhausted("there are no host pages: " + space_.context.host_refused, count);
  }
  if (place == Place::kPeer && !space_.context.peer_pages) throw UsageError("there is no peer");
  const Pool& pool = space_.pool(place);
  Pieces found;
  bool waited = !wait, prepared = false;
  for (;;) {
    found = look(range, first, count, own_page_in(place));
    const bool lacking = pool.available() < found.unbacked.size() && !fences_.streams.capturing();
    if (!waited && (found.elsewhere || lacking)) {
      retirement_.reap_waiting(in);
      waited = true;
    } else if (place == Place::kHost && !prepared && pool.book.idle() < found.unbacked.size()) {
      space_.prepare(in, place, found.unbacked.size());
      prepared = true;
    } else {
      break;
    }
    range.check_span(first, count);
  }
  if (found.elsewhere) throw UsageError(format("a piece from %zu on is still about to lose another page", first));
  apply(in, range, found, {first, count}, place);
}

// Throws UsageError where a piece leads to another kind of page, DriverError.
Mapping::Pieces Mapping::look(Range& range, std::size_t first, std::size_t count, LeadsTo wanted) {
  Pieces found;
  for (std::size_t i = first; i < first + count; ++i) {
    if (range.addresses[i].leads_to == LeadsTo::kKept && wanted != LeadsTo::kDevice)
      space_.vacate_kept(range.addresses, i);
    const Piece& piece = range.addresses[i];
    if (piece.leads_to == LeadsTo::kNone) {
      found.unbacked.push_back(i);
    } else if (piece.leads_to == LeadsTo::kRetiring) {
      if (piece.retiring_from == wanted) found.revived.push_back(i);
      found.elsewhere |= piece.retiring_from != wanted;
    } else if (piece.leads_to == LeadsTo::kKept) {
      found.claimed.push_back(i);
    } else if (piece.leads_to != wanted) {
      throw UsageError(format("piece %zu already leads to another kind of page", i));
    }
  }
  return found;
}

void Mapping::apply(Section& in, Range& range, const Pieces& found, const Span& span, Place place) {
  const LeadsTo wanted = own_page_in(place);
  for (std::size_t i : found.revived) space_.revive(range.addresses, i, range.owner);
  for (std::size_t i : found.claimed) space_.claim(range.addresses, i, range.owner);
  try {
    for (std::size_t i = span.first; i < span.first + span.count;
         ++i) {  // what failed half way may have left some shut
      if (range.addresses[i].leads_to == wanted && !range.addresses[i].open) space_.open(range.addresses, i, 1);
    }
    if (const std::size_t n = found.unbacked.size()) {
      const PageId hint = hint_for(range, found.unbacked.front(), place);
      back(range, found.unbacked, place, take(in, place, n, range.owner, hint));
    }
  } catch (...) {
    Spans revived;
    for (std::size_t i : found.revived) revived.push_back({i, 1});
    retirement_.retire(range, revived);
    for (std::size_t i : found.claimed) space_.keep(range.addresses, i, false);
    throw;
  }
  for (std::size_t i = span.first; i < span.first + span.count; ++i) space_.table.spare(range.addresses, i);
}

std::vector<PageId> Mapping::take(Section& in, Place place, std::size_t n, Owner owner, PageId hint) {
  Pool& pool = space_.pool(place);
  if (pool.book.idle() < n) retirement_.reap(in);
  if (pool.book.kept() == 0) return pool.take(n, owner, hint);
  cached_.empty(n, CachedRanges::Take::kNotAhead);
  if (pool.book.idle() + pool.creatable() < n) cached_.empty(n - pool.creatable(), CachedRanges::Take::kAll);
  try {
    return pool.take(n, owner, hint);
  } catch (const PoolExhausted&) {
    if (pool.book.kept() == 0) throw;
    cached_.empty(n, CachedRanges::Take::kAll);  // the driver has less than the budget allows
  }
  return pool.take(n, owner, hint);
}

void Mapping::back(Range& range, const std::vector<std::size_t>& pieces, Place place,
                   const std::vector<PageId>& pages) {
  std::size_t mapped = 0;
  try {
    for (; mapped < pieces.size(); ++mapped) {
      space_.map(range.addresses, pieces[mapped], {pages[mapped], own_page_in(place), place});
    }
    for (std::size_t from = 0, to = 0; from < pieces.size(); from = to) {
      to = from + 1;
      while (to < pieces.size() && pieces[to] == pieces[to - 1] + 1) ++to;
      space_.open(range.addresses, pieces[from], to - from);
    }
  } catch (...) {
    Spans undone;
    for (std::size_t i = 0; i < mapped; ++i) undone.push_back({pieces[i], 1});
    retirement_.retire(range, undone);
    for (std::size_t i = mapped; i < pages.size(); ++i) space_.pool(place).give(pages[i]);
    throw;
  }
}

PageId Mapping::hint_for(const Range& range, std::size_t piece, Place place) const {
  if (piece == 0) return kNoPage;
  const Piece& before = range.addresses[piece - 1];
  const bool same =
      before.leads_to == own_page_in(place) || (before.leads_to == LeadsTo::kKept && place == Place::kDevice);
  return same ? before.page + 1 : kNoPage;
}

}  // namespace ballonet
