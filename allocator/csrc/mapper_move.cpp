// How the bytes behind an address move to another page.
#include <exception>
#include <utility>

#include "mapper.h"

namespace ballonet {

bool Mapper::clear_scratch() {
  if (scratch_pool_ == nullptr) return true;
  if (!driver_.cuStreamSynchronize(context_.copy_stream).ok()) return false;  // no fence covers the copy stream
  if (!driver_.cuMemUnmap(context_.scratch, page_size).ok()) return false;
  --scratch_pool_->mappings(scratch_page_);
  release_page(*scratch_pool_, scratch_page_);
  scratch_pool_ = nullptr;
  scratch_page_ = kNoPage;
  return true;
}

bool Mapper::move(Range& range, std::size_t index, Place to) {
  Ranges done;
  std::unique_lock<std::mutex> lease;
  if (!may_change(range, lease)) return false;
  if (to == Place::kHost && !context_.host_pages) return false;
  const auto movable = [&] {
    check_span(range, index, 1);
    const Range::Piece& piece = range.at(index);
    return has_own_page(piece.backing) && !piece.doomed && pool_of(piece).mappings(piece.page) == 1;
  };
  std::lock_guard<std::mutex> scratch(scratch_mutex_);
  DriverScope scope(driver_, context_.handle);
  Lock lock(mutex);
  if (!movable()) return false;
  if (to == Place::kHost) prepare(lock, host_, 1);
  // Copies are submitted without the lock: one that begins after the streams have passed may use the page.
  const std::uint64_t submitted = submitted_;
  const auto copies_began = [&] { return submitting_ != 0 || submitted_ != submitted; };
  if (!quiesce(lock) || copies_began()) return false;
  reap_locked(done);
  if (!movable()) return false;
  const Stretch::Piece before = range.at(index);
  Pool& source = pool_of(before);
  Pool& target = pool_of(to);
  if (!clear_scratch() || target.available() == 0) return false;
  const PageId old = before.page;
  PageId fresh;
  try {
    fresh = take_pages(target, 1, range.owner, kNoPage, done).front();
  } catch (const PoolExhausted&) {
    return false;
  }

  // Fill the new page at the scratch addresses.
  const CUdeviceptr here = address(range, index);
  Readable readable(driver_, page_size);
  readable.add(here);
  try {
    map_page(context_.scratch, target, fresh);
    scratch_pool_ = &target;
    scratch_page_ = fresh;
    allow_access(context_.scratch, 1, to);
    driver_.cuMemcpyAsync(context_.scratch, here, page_size, context_.copy_stream).or_throw("copying a page");
    {
      Unlocked unlocked(lock);
      driver_.cuStreamSynchronize(context_.copy_stream).or_throw("waiting for the copy of a page");
    }
    if (!clear_scratch()) {
      throw DriverError("cuMemUnmap", cuda::kOperatingSystem, "a failure", "clearing the addresses of a page's copy");
    }
    const Range::Piece& now = range.at(index);
    if (range.closed_ || now.changed != before.changed || now.page != old || now.place != before.place || now.doomed ||
        copies_began()) {
      target.relabel(fresh, Owner::kRetiring);  // someone has retired it meanwhile
      release_page(target, fresh);
      return false;
    }
    driver_.cuMemUnmap(here, page_size).or_throw("taking a page from its address");
  } catch (...) {
    target.relabel(fresh, Owner::kRetiring);
    if (clear_scratch() && target.owner(fresh) == Owner::kRetiring) release_page(target, fresh);
    throw;
  }
  Range::Piece& piece = range.at(index);
  --source.mappings(old);

  // From here on the piece is bare: put the new page there, or, where that fails, the old one. Both hold the bytes.
  Pool* shown = nullptr;  // the page that is mapped at the address, and its pool
  PageId page = kNoPage;
  const auto show = [&](Pool& pool, PageId wanted) {
    if (shown != nullptr) {
      driver_.cuMemUnmap(here, page_size).or_throw("taking a page from its address");
      --shown->mappings(page);
      shown = nullptr;
    }
    map_page(here, pool, wanted);
    shown = &pool;
    page = wanted;
    allow_access(here, 1, place_of(pool));
  };
  const Place from = piece.place;
  std::exception_ptr failed;
  piece.open = false;
  for (int attempt = 0; attempt < 4 && !piece.open; ++attempt) {
    try {
      attempt == 0 ? show(target, fresh) : show(source, old);
      piece.open = true;
    } catch (const DriverError&) {
      if (!failed) failed = std::current_exception();
    }
  }
  // A driver that refuses again and again leaves a page without access, which the next `map` gives, or none.
  piece.page = shown == nullptr ? kNoPage : page;
  piece.place = shown == nullptr ? Place::kDevice : place_of(*shown);
  piece.backing = shown == nullptr ? Backing::kNone : backing_of(piece.place);
  for (const auto& [pool, spare] : {std::pair{&target, fresh}, std::pair{&source, old}}) {
    if (shown == pool && page == spare) continue;
    pool->relabel(spare, Owner::kRetiring);
    release_page(*pool, spare);
  }
  if (failed) std::rethrow_exception(failed);
  if (from != to) count_copy(range.owner, from, to, page_size);
  return true;
}

// A thread that submits copies; made and ended with the lock held.
class Mapper::Submitting {
 public:
  explicit Submitting(Mapper& mapper) : mapper_(mapper) {
    ++mapper_.submitted_;
    ++mapper_.submitting_;
  }
  ~Submitting() { --mapper_.submitting_; }
  Submitting(const Submitting&) = delete;
  Submitting& operator=(const Submitting&) = delete;

 private:
  Mapper& mapper_;
};

// The copies are submitted without the lock: the driver may read plain memory before it returns.
Fence Mapper::copy(const std::vector<Copy>& parts, std::optional<CUstream> after, Owner owner, Place to) {
  const CUstream stream = to == Place::kDevice ? to_device_ : from_device_;
  DriverScope scope(driver_, context_.handle);
  Lock lock(mutex);
  if (after) streams_.note(*after);
  const std::vector<CUstream> earlier = after ? std::vector<CUstream>{*after} : streams_.seen();
  Fence before = streams_.fence(earlier);
  // Asked once there is an event: one that belongs to a capture would draw the copies into its graph.
  if (streams_.capturing(earlier)) {
    streams_.recycle(before);
    throw UsageError("nothing can be copied for a stream that is being captured");
  }
  try {
    if (!before.recorded || before.sync != 0) await(lock, streams_.awaited(before));
    const Submitting submitting(*this);
    Unlocked unlocked(lock);
    for (CUevent event : before.events) {
      driver_.cuStreamWaitEvent(stream, event, 0U).or_throw("ordering a copy after what runs");
    }
    for (const Copy& part : parts) {
      driver_.cuMemcpyAsync(part.to, part.from, part.size, stream)
          .or_throw(format("copying %s", in_units(part.size).c_str()));
    }
  } catch (...) {
    {
      Unlocked unlocked(lock);
      driver_.cuStreamSynchronize(stream);
    }
    streams_.recycle(before);
    throw;
  }
  for (const Copy& part : parts) {
    count_copy(owner, place_at(part.from).value_or(Place::kHost), place_at(part.to).value_or(to), part.size);
  }
  streams_.recycle(before);
  Fence done = streams_.fence({stream});
  if (!done.recorded || done.sync != 0) await(lock, streams_.awaited(done));
  return done;
}

// Where the page is that an address leads to; nothing where it is not ours, as registered memory is not.
std::optional<Place> Mapper::place_at(CUdeviceptr at) {
  for (const Range* range : ranges_) {
    const Stretch& held = range->held_;
    if (held.pieces == 0 || at < held.base || at - held.base >= held.table.size() * page_size) continue;
    return held.table[(at - held.base) / page_size].place;
  }
  return {};
}

// What stays on the host, as from a file to the pages of its twin, is none.
void Mapper::count_copy(Owner owner, Place from, Place to, std::size_t size) {
  if (from == to) return;
  const bool down = to == Place::kHost;
  if (owner == Owner::kWeights) (down ? copied_.weights_d2h : copied_.weights_h2d) += size;
  if (owner != Owner::kKv) return;
  if (from == Place::kPeer) {
    (down ? copied_.kv_p2h : copied_.kv_p2d) += size;
  } else if (to == Place::kPeer) {
    copied_.kv_d2p += size;
  } else {
    (down ? copied_.kv_d2h : copied_.kv_h2d) += size;
  }
}

}  // namespace ballonet
