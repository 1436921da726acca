#include "mapping/ahead.h"

#include <algorithm>
#include <utility>

#include "base/tuning.h"
#include "mapping/mapper.h"

namespace ballonet {
std::size_t Ahead::limit() const { return std::max<std::size_t>(1, tuning::kAheadBytes / space_.page_size); }

void Ahead::ask(const std::shared_ptr<Range>& range, std::size_t first, std::size_t count) {
  if (first > range->pieces || count > range->pieces - first) {
    throw UsageError(format("pieces %zu to %zu lie outside a range of %zu", first, first + count, range->pieces));
  }
  if (range->owner != Owner::kKv) throw UsageError("only ranges of KV are mapped ahead");
  if (count > 0 && background_.running() && push({range, first, first + count})) background_.notify();
}

bool Ahead::push(Request request) {
  const std::lock_guard lock(mutex_);
  if (requests_.size() == tuning::kAheadRequests) return false;
  requests_.push_back(std::move(request));
  return true;
}

void Ahead::tell_followers(Range& range, std::size_t first, std::size_t count) {
  if (!background_.running()) return;
  if (const std::size_t more = std::exchange(range.followers, 0)) {
    expect_no_more();
    coming_ = Coming{&range, &range, more, first + count};
  }
  if (!range.next.expired()) {
    push({range.next, first, first + count});
  } else if (!coming_) {
    return;  // no range follows, and no claim has made room for others
  }
  background_.notify();
}

void Ahead::one_came(Range& range) {
  if (!coming_ || coming_->like->pieces != range.pieces || coming_->like->group != range.group) return;
  coming_->last->next = range.weak_from_this();
  coming_->last = &range;
  if (--coming_->left == 0) return expect_no_more();
  background_.notify();
}

void Ahead::one_ended(const Range& range) {
  if (coming_ && (coming_->like == &range || coming_->last == &range)) expect_no_more();
}

void Ahead::expect_no_more() {
  if (!coming_) return;
  coming_.reset();
  cached_.unpromise();
}

void Ahead::forget_requests() {
  const std::lock_guard lock(mutex_);
  requests_.clear();
}

bool Ahead::wanted() const {
  const std::lock_guard lock(mutex_);
  return !requests_.empty() || coming_;
}

bool Ahead::serve_request(Section& in) {
  Request* oldest;
  {
    const std::lock_guard lock(mutex_);
    if (requests_.empty()) return false;
    oldest = &requests_.front();  // stays: others only add to the end, and only holders of the mapper's lock remove
  }
  if (const std::shared_ptr<Range> range = oldest->range.lock()) {
    in.ended.push_back(range);
    const auto backed = [&] { return range->addresses[oldest->next].leads_to != LeadsTo::kNone; };
    while (!range->closed && oldest->next < oldest->end && backed()) ++oldest->next;
    const bool wanted = !range->closed && oldest->next < oldest->end;
    if (wanted && map_one(*range, oldest->next, CachedRanges::Take::kNotAhead)) return true;
  }
  const std::lock_guard lock(mutex_);
  requests_.pop_front();
  return true;
}

bool Ahead::serve_coming(Section& in, Mapper& mapper) {
  if (!coming_ || space_.table.ahead() >= limit() || fences_.streams.capturing()) return false;
  const bool enough = cached_.promise(coming_->like->pieces, coming_->left) == coming_->left;
  if (enough && !cached_.lacks(coming_->mapped)) return false;
  cached_.empty(1, CachedRanges::Take::kUnpromised);
  if (space_.device.book.idle() + space_.device.creatable() == 0) return false;
  Stretch addresses = cached_.take_lacking(coming_->mapped);
  if (addresses.pieces == 0) {
    try {
      addresses = space_.reserve(coming_->like->pieces);
    } catch (const DriverError&) {
      expect_no_more();
      return false;
    }
  }
  // As a range that is closed it becomes a cached range again, whatever fails meanwhile.
  const std::size_t pieces = addresses.pieces;
  const auto range =
      std::make_shared<Range>(mapper.shared_from_this(), std::move(addresses), pieces, Owner::kKv, nullptr, false);
  in.ended.push_back(range);
  range->closed = true;
  std::size_t piece = 0;
  while (range->addresses[piece].leads_to != LeadsTo::kNone) ++piece;
  const bool mapped = map_one(*range, piece, CachedRanges::Take::kUnpromised);
  cached_.keep_closed(*range);
  if (range->addresses.pieces > 0) {  // a page that could not be opened is retiring there
    for (std::size_t i = 0; range->addresses.ahead() > 0; ++i) space_.table.forget_ahead(range->addresses, i);
    space_.ranges.insert(range.get());
  }
  if (!mapped) expect_no_more();
  return mapped;
}

// Pre: the piece is unbacked. False where no more can be mapped ahead.
bool Ahead::map_one(Range& range, std::size_t piece, CachedRanges::Take take) {
  if (space_.table.ahead() >= limit() || fences_.streams.capturing()) return false;
  cached_.empty(1, take);
  try {
    const PageId hint = mapping_.hint_for(range, piece, Place::kDevice);
    mapping_.back(range, {piece}, Place::kDevice, space_.device.take(1, range.owner, hint));
  } catch (const std::runtime_error&) {
    return false;
  }
  space_.keep(range.addresses, piece, true);
  return true;
}

void Ahead::check() const {
  if (space_.table.ahead() > limit()) throw InvariantBroken("more pages are mapped ahead than there may be");
}

}  // namespace ballonet
