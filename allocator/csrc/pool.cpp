#include "pool.h"

#include <algorithm>

#include "context.h"

namespace ballonet {

Pool::Pool(const Driver& driver, const CUmemAllocationProp& place, std::size_t page_size, std::size_t budget,
           Journal* journal)
    : driver_(driver), place_(place), page_size_(page_size), budget_(budget), journal_(journal) {}

std::size_t Pool::missing(std::size_t n) const {
  const std::size_t allowed = idle() + kept() + budget_;
  return n + created_ > allowed ? n + created_ - allowed : 0;
}

std::vector<PageId> Pool::take(std::size_t n, Owner owner, PageId hint) {
  const std::size_t at_hand = idle() + creatable();
  if (n > at_hand) {
    throw PoolExhausted(format("%zu pages of %s asked for, %zu can be had", n, in_units(page_size_).c_str(), at_hand),
                        n, missing(n));
  }
  // What was created stays, free, where a later creation fails: nothing is lost and nobody owns it.
  while (free_.size() < n) create_one(n);
  std::vector<PageId> taken;
  taken.reserve(n);
  auto next = hint == kNoPage ? free_.begin() : free_.lower_bound(hint);
  for (std::size_t i = 0; i < n; ++i) {
    if (next == free_.end()) next = free_.begin();
    taken.push_back(*next);
    next = free_.erase(next);
  }
  for (PageId page : taken) label(page, owner);
  if (journal_ != nullptr) journal_->note(counts_);
  return taken;
}

std::size_t Pool::prepare(std::size_t n) {
  try {
    while (idle() < n && creatable() > 0) create_one(n);
  } catch (const std::runtime_error&) {
    // Whoever asks has another place for the rest.
  }
  return std::min(n, idle());
}

void Pool::give(PageId page) {
  label(page, Owner::kFree);
  free_.insert(page);
  shrink();
  if (journal_ != nullptr) journal_->note(counts_);
}

void Pool::relabel(PageId page, Owner owner) {
  label(page, owner);
  if (journal_ != nullptr) journal_->note(counts_);
}

void Pool::keep(PageId page) {
  label(page, Owner::kFree);
  pages_[page].kept = true;
  ++kept_;
  if (journal_ != nullptr) journal_->note(counts_);
}

void Pool::claim(PageId page, Owner owner) {
  pages_[page].kept = false;
  --kept_;
  relabel(page, owner);
}

void Pool::let_go(PageId page) {
  pages_[page].kept = false;
  --kept_;
  give(page);
}

void Pool::label(PageId page, Owner owner) {
  --counts_[static_cast<std::size_t>(pages_[page].owner)];
  pages_[page].owner = owner;
  ++counts_[static_cast<std::size_t>(owner)];
}

// `place` is afterwards what the driver agreed to.
CUresult Pool::create(CUmemGenericAllocationHandle& handle, CUmemAllocationProp& place) const {
  auto made = driver_.cuMemCreate(&handle, page_size_, &place, 0ULL);
  const auto refused = [&] {
    return made.code() == cuda::kNotSupported || made.code() == cuda::kNotPermitted ||
           made.code() == cuda::kInvalidValue;
  };
  while (refused() && ask_for_less(place)) made = driver_.cuMemCreate(&handle, page_size_, &place, 0ULL);
  return made.code();
}

// `wanted`: pages that must be free in the end.
void Pool::create_one(std::size_t wanted) {
  CUmemGenericAllocationHandle handle = 0;
  const CUresult made = create(handle, place_);
  if (made == cuda::kOutOfMemory) {
    throw PoolExhausted(format("the driver has no memory for another page of %s, although the budget allows %zu more",
                               in_units(page_size_).c_str(), creatable()),
                        wanted, wanted - free_.size());
  }
  driver_.judge(Fn::cuMemCreate, made).or_throw("creating a page");
  add(handle);
}

Pool::Creation Pool::begin_creating(std::size_t n) {
  Creation begun;
  begun.pages = std::min(n, creatable());
  begun.place = place_;
  begun.made.reserve(begun.pages);
  creating_ += begun.pages;
  return begun;
}

void Pool::create(Creation& creation) const {
  CUmemGenericAllocationHandle handle = 0;
  while (creation.made.size() < creation.pages && create(handle, creation.place) == cuda::kSuccess)
    creation.made.push_back(handle);
}

void Pool::end_creating(const Creation& creation) {
  creating_ -= creation.pages;
  place_ = creation.place;
  for (CUmemGenericAllocationHandle handle : creation.made) add(handle);
  shrink();
  if (journal_ != nullptr) journal_->note(counts_);
}

void Pool::add(CUmemGenericAllocationHandle handle) {
  PageId page;
  if (absent_.empty()) {
    page = static_cast<PageId>(pages_.size());
    pages_.emplace_back();
  } else {
    page = *absent_.begin();
    absent_.erase(absent_.begin());
  }
  pages_[page] = {handle, Owner::kFree, true, false, 0};
  ++counts_[static_cast<std::size_t>(Owner::kFree)];
  free_.insert(page);
  created_peak_ = std::max(created_peak_, ++created_);
}

// A release that fails is tried once more; a page that cannot be released stays free until the pool next shrinks.
bool Pool::release_one(PageId page) {
  const CUmemGenericAllocationHandle handle = pages_[page].handle;
  if (!driver_.cuMemRelease(handle).ok() && !driver_.cuMemRelease(handle).ok()) return false;
  free_.erase(page);
  absent_.insert(page);
  pages_[page] = {};
  --counts_[static_cast<std::size_t>(Owner::kFree)];
  --created_;
  return true;
}

void Pool::set_budget(std::size_t pages) {
  budget_ = pages;
  shrink();
  if (journal_ != nullptr) journal_->note(counts_);
}

// From the highest id down, so that what remains is dense.
void Pool::shrink() {
  while (created_ > budget_ && !free_.empty() && release_one(*free_.rbegin())) {
  }
  above_.store(created_ > budget_, std::memory_order_relaxed);
}

std::size_t Pool::release_free() {
  while (!free_.empty() && release_one(*free_.rbegin())) {
  }
  shrink();
  if (journal_ != nullptr) journal_->note(counts_);
  return free_.size();
}

void Pool::check() const {
  std::array<std::size_t, kOwners> counted{};
  std::size_t created = 0, kept = 0;
  for (PageId page = 0; page < pages_.size(); ++page) {
    const Page& entry = pages_[page];
    if (entry.created == (absent_.count(page) == 1))
      throw InvariantBroken(format("page %u is both created and absent", page));
    if (!entry.created) continue;
    ++created;
    ++counted[static_cast<std::size_t>(entry.owner)];
    const bool is_free = entry.owner == Owner::kFree;
    if ((is_free && !entry.kept) != (free_.count(page) == 1))
      throw InvariantBroken(format("page %u is free in one book only", page));
    if (is_free && entry.mappings != (entry.kept ? 1 : 0))
      throw InvariantBroken(format("free page %u is mapped %u times", page, entry.mappings));
    if (entry.kept && !is_free) throw InvariantBroken(format("page %u is kept and has an owner", page));
    kept += entry.kept ? 1 : 0;
  }
  if (created != created_ || counted != counts_ || kept != kept_)
    throw InvariantBroken("the owners' pages do not add up to those created");
}

}  // namespace ballonet
