#include "mapping/exchange.h"

#include <algorithm>
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

}  // namespace ballonet
