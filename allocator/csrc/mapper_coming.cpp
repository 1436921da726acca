// Slots for ranges that are about to come.
//
// Note [Ranges to come]
// The first prefill of a process finds no slots, and each layer's range would wait for its pages when it comes. But the
// layers of a cache are alike: once the first has its pages it is known how many the others will want, and while a
// layer is computed there is time to map those of the next. So whoever reserves the first range says how many will
// follow, and the background makes slots for them, from pages that are free or may be created, no more than
// `ahead_limit` at a time: a range that comes takes its slot and makes room for the next. Nothing is made that will not
// be used, and what was promised and does not come (a forward that fails) is an ordinary slot once the first range is
// closed. One cache at a time is served, the one that asked last; others map as they go.
//
// Creating pages ahead without mapping them needs no such limit, and is not worth it: of the time that a page costs on
// CUDA that is a quarter, access is the rest. Nor can activations be had ahead: a first layer asks for all of theirs
// within a millisecond, and nobody knows how many before.
#include "mapper.h"

namespace ballonet {

// Pieces of a range of KV have been mapped: ranges that follow it will want as many. Pre: the caller holds the lock.
void Mapper::tell_followers(Range& range, std::size_t first, std::size_t count) {
  if (!background_.running()) return;
  if (const std::size_t more = std::exchange(range.more_, 0)) {
    expect_no_more();
    coming_ = Coming{&range, &range, more, first + count};
  }
  if (!range.next_.expired()) {
    std::lock_guard<std::mutex> requests(requests_mutex_);
    if (requests_.size() < kRequests) requests_.push_back({range.next_, first, first + count});
  } else if (!coming_) {
    return;  // nobody follows, and no claim has made room for others
  }
  background_.notify();
}

// A range that wants a slot has been reserved: one of those that were announced, or not.
void Mapper::one_came(Range& range) {
  if (!coming_ || coming_->like->pieces != range.pieces || coming_->like->group != range.group) return;
  coming_->last->next_ = range.weak_from_this();
  coming_->last = &range;
  if (--coming_->left == 0) return expect_no_more();
  background_.notify();
}

void Mapper::expect_no_more() {
  if (!coming_) return;
  coming_.reset();
  for (Stretch& slot : slots_) {
    slot.promised = false;
    for (std::size_t i = 0; slot.ahead > 0; ++i) forget_ahead(slot, i);
  }
}

// Says which slots are for the ranges to come; returns how many there are.
std::size_t Mapper::promise_slots() {
  std::vector<SlotSize> sizes;
  for (Stretch& slot : slots_) {
    sizes.push_back({slot.pieces, slot.kept});
    slot.promised = false;
  }
  const std::vector<std::size_t> chosen = slots_for(sizes, coming_->like->pieces, coming_->left);
  for (std::size_t each : chosen) slots_[each].promised = true;
  return chosen.size();
}

// The fullest of the promised slots that lack pages. Pre: `promise_slots` has been called.
std::deque<Stretch>::iterator Mapper::lacking_slot() {
  auto found = slots_.end();
  for (auto slot = slots_.begin(); slot != slots_.end(); ++slot) {
    if (!slot->promised || slot->kept >= coming_->mapped) continue;
    if (found == slots_.end() || slot->kept > found->kept) found = slot;
  }
  return found;
}

// One page for the ranges to come. False where none is lacking, or none can be had. Pre: the caller holds the lock.
bool Mapper::work_coming(Ranges& done) {
  if (!coming_ || ahead_ >= ahead_limit() || streams_.capturing()) return false;
  const bool enough = promise_slots() == coming_->left;
  if (enough && lacking_slot() == slots_.end()) return false;
  empty_slots(1, Take::kUnpromised);
  if (device_.idle() + device_.creatable() == 0) return false;
  Stretch held;
  if (const auto lacking = lacking_slot(); lacking != slots_.end()) {
    held = std::move(*lacking);
    slots_.erase(lacking);
  } else {
    try {
      held = reserved(coming_->like->pieces);
    } catch (const DriverError&) {
      expect_no_more();
      return false;
    }
  }
  // As a range that is closed it becomes a slot again, whatever fails meanwhile.
  const std::size_t pieces = held.pieces;
  const auto slot = std::make_shared<Range>(shared_from_this(), std::move(held), pieces, Owner::kKv, nullptr, false);
  done.push_back(slot);
  slot->closed_ = true;
  std::size_t piece = 0;
  while (slot->at(piece).backing != Backing::kNone) ++piece;
  const bool mapped = map_one_ahead(*slot, piece, Take::kUnpromised);
  settle(*slot);
  if (slot->held_.pieces > 0) {  // a page that could not be opened is retiring there
    for (std::size_t i = 0; slot->held_.ahead > 0; ++i) forget_ahead(slot->held_, i);
    ranges_.insert(slot.get());
  }
  if (!mapped) expect_no_more();
  return mapped;
}

}  // namespace ballonet
