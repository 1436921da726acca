#include "pages/page_book.h"

#include <algorithm>

#include "base/errors.h"

namespace ballonet {

void PageBook::add(CUmemGenericAllocationHandle handle) {
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

void PageBook::remove(PageId page) {
  free_.erase(page);
  absent_.insert(page);
  pages_[page] = {};
  --counts_[static_cast<std::size_t>(Owner::kFree)];
  --created_;
}

std::vector<PageId> PageBook::take(std::size_t n, Owner owner, PageId hint) {
  std::vector<PageId> taken;
  taken.reserve(n);
  auto next = hint == kNoPage ? free_.begin() : free_.lower_bound(hint);
  for (std::size_t i = 0; i < n; ++i) {
    if (next == free_.end()) next = free_.begin();
    taken.push_back(*next);
    next = free_.erase(next);
  }
  for (PageId page : taken) label(page, owner);
  note();
  return taken;
}

void PageBook::give(PageId page) {
  if (pages_[page].kept) end_keeping(page);
  label(page, Owner::kFree);
  free_.insert(page);
}

void PageBook::relabel(PageId page, Owner owner) {
  label(page, owner);
  note();
}

void PageBook::keep(PageId page) {
  label(page, Owner::kFree);
  pages_[page].kept = true;
  ++kept_;
  note();
}

void PageBook::claim(PageId page, Owner owner) {
  end_keeping(page);
  relabel(page, owner);
}

void PageBook::end_keeping(PageId page) {
  pages_[page].kept = false;
  --kept_;
}

void PageBook::label(PageId page, Owner owner) {
  --counts_[static_cast<std::size_t>(pages_[page].owner)];
  pages_[page].owner = owner;
  ++counts_[static_cast<std::size_t>(owner)];
}

void PageBook::check() const {
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
