// How pages leave their addresses. See Note [Retiring] in mapper.h.
#include <algorithm>
#include <utility>

#include "mapper.h"

namespace ballonet {

void Mapper::retire(Range& range, const Spans& spans) {
  Ranges done;
  std::lock_guard<std::mutex> lock(mutex);
  for (const Span& span : spans) check_span(range, span.first, span.count);
  DriverScope scope(driver_, context_.handle);
  retire_locked(range, spans);
  reap_later(done);
}

void Mapper::retire_locked(Range& range, const Spans& spans, bool unseen) {
  const std::uint32_t ticket = next_ticket_++;
  bool any = false;
  for (const Span& span : spans) {
    for (std::size_t i = span.first; i < std::min(span.first + span.count, range.held_.table.size()); ++i) {
      Range::Piece& piece = range.at(i);
      if (piece.backing == Backing::kKept) forget_ahead(range.held_, i);
      if (!leads_somewhere(piece.backing)) continue;
      piece.changed = ++changes_;
      if (piece.pins > 0) {
        piece.doomed = true;
        continue;
      }
      if (piece.backing != Backing::kAlias) pool_of(piece).relabel(piece.page, Owner::kRetiring);
      piece.retiring_from = piece.backing;
      piece.backing = Backing::kRetiring;
      piece.ticket = ticket;
      piece.doomed = false;
      any = true;
    }
  }
  if (!any) return;
  const bool shares = !unseen && !retiring_.empty() && !retiring_.back().fence->recorded;
  const auto made = [&] { return std::make_shared<Fence>(unseen ? streams_.fence_over_all() : Streams::fence()); };
  auto fence = shares ? retiring_.back().fence : made();
  retiring_.push_back({std::move(fence), range.shared_from_this(), spans, ticket});
}

std::size_t Mapper::reap(bool wait) {
  Ranges done;
  DriverScope scope(driver_, context_.handle);
  Lock lock(mutex);
  return wait ? reap_waiting(lock, done) : reap_locked(done);
}

// In the background, or now where there is none.
void Mapper::reap_later(Ranges& done) {
  if (!background_.running()) {
    reap_locked(done);
  } else if (!retiring_.empty()) {
    background_.notify();
  }
}

std::size_t Mapper::reap_locked(Ranges& done) {
  std::size_t freed = 0;
  // A retirement whose unmap fails goes to the back of the queue, and is met once per reap.
  for (std::size_t left = retiring_.size(); left > 0 && streams_.passed(*retiring_.front().fence); --left) {
    Retirement current = std::move(retiring_.front());
    retiring_.pop_front();
    if (finish_retired(current, ~std::size_t{0}, freed) == Left::kNone) {
      done.push_back(std::move(current.range));
    } else {
      retiring_.push_back(std::move(current));
    }
  }
  return freed;
}

std::size_t Mapper::reap_waiting(Lock& lock, Ranges& done) {
  Awaited all;
  const Fence* last = nullptr;
  for (Retirement& each : retiring_) {
    if (std::exchange(last, each.fence.get()) == each.fence.get()) continue;
    const Awaited one = streams_.awaited(*each.fence);
    all.events.insert(all.events.end(), one.events.begin(), one.events.end());
    all.sync = std::max(all.sync, one.sync);
  }
  await(lock, all);
  return reap_locked(done);
}

// At most so many pieces of a retirement that has passed: they are unmapped, or kept for a slot.
Mapper::Left Mapper::finish_retired(Retirement& retirement, std::size_t most, std::size_t& freed) {
  Left left = Left::kNone;
  Range& range = *retirement.range;
  for (const Span& span : retirement.spans) {
    for (std::size_t i = span.first; i < std::min(span.first + span.count, range.held_.table.size()); ++i) {
      const Range::Piece& piece = range.at(i);
      if (piece.backing != Backing::kRetiring || piece.ticket != retirement.ticket) continue;  // taken back meanwhile
      if (most-- == 0) return Left::kSome;
      if (may_keep(range, piece)) {
        keep(range, i, false);
        ++freed;
      } else if (unmap_piece(range, i)) {
        ++freed;
      } else {
        left = Left::kRefused;
      }
    }
  }
  if (left == Left::kNone) settle(range);
  return left;
}

bool Mapper::unmap_piece(Range& range, std::size_t index) {
  if (!driver_.cuMemUnmap(address(range, index), page_size).ok()) return false;
  Range::Piece& piece = range.at(index);
  Pool& pool = pool_of(piece);
  const PageId page = piece.page;
  piece.page = kNoPage;
  piece.backing = piece.retiring_from = Backing::kNone;
  piece.ticket = 0;
  piece.open = false;
  --pool.mappings(page);
  release_page(pool, page);
  return true;
}

// A retiring page is free once nothing leads to it any more.
void Mapper::release_page(Pool& pool, PageId page) {
  if (pool.owner(page) == Owner::kRetiring && pool.mappings(page) == 0) pool.give(page);
}

// Ahead of a fork: a child needs no page that its owner has given up, although it is still mapped.
void Mapper::tell_idle() {
  const auto tell = [this](const Stretch& stretch) {
    for (std::size_t i = 0; i < stretch.table.size(); ++i) {
      const Backing backing = stretch.table[i].backing;
      if (backing == Backing::kRetiring || backing == Backing::kKept)
        idle_at_fork(stretch.base + i * page_size, page_size);
    }
  };
  for (const Range* range : ranges_) tell(range->held_);
  for (const Stretch& slot : slots_) tell(slot);
}

}  // namespace ballonet
