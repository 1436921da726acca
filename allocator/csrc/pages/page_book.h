// Which pages of a pool exist, who owns each, and at how many addresses it is mapped. Pure: it calls no driver.
//
// Words
//   page     one driver handle of page_size bytes; its id is its index here and never changes while it exists
//   absent   an id whose handle is not created; costs nothing
//   idle     free, and behind no address
//   kept     free, and still behind an address, where it may be claimed without the driver; see cached_ranges.h
//
// Guarantees, which `check` verifies: free, owned and retiring pages add up to those that exist; a free page that is
// not kept is behind no address.
//
// Lock: the mapper's, held by the caller.
#pragma once

#include <array>
#include <set>
#include <vector>

#include "driver/driver_abi.h"
#include "pages/events.h"
#include "pages/page.h"

namespace ballonet {

class PageBook {
 public:
  // `journal` gets the changes; may be nullptr.
  explicit PageBook(Journal* journal) : journal_(journal) {}

  std::size_t created() const { return created_; }
  std::size_t created_peak() const { return created_peak_; }
  void reset_peak() { created_peak_ = created_; }
  const std::array<std::size_t, kOwners>& counts() const { return counts_; }
  std::size_t count(Owner owner) const { return counts_[static_cast<std::size_t>(owner)]; }
  std::size_t idle() const { return free_.size(); }
  std::size_t kept() const { return kept_; }

  bool kept(PageId page) const { return pages_[page].kept; }
  Owner owner(PageId page) const { return pages_[page].owner; }
  CUmemGenericAllocationHandle handle(PageId page) const { return pages_[page].handle; }
  unsigned& mappings(PageId page) { return pages_[page].mappings; }

  // Adds a new page, idle; removes one that the driver has taken back. Pre, of the second: idle.
  void add(CUmemGenericAllocationHandle handle);
  void remove(PageId page);
  // The idle page of the highest id. Pre: there is one.
  PageId last_idle() const { return *free_.rbegin(); }

  // `n` idle pages for `owner`; see Pool::take. Pre: so many are idle.
  std::vector<PageId> take(std::size_t n, Owner owner, PageId hint);
  // The page is idle. Pre: not free, or kept; no mapping. The caller calls `note` once it is done.
  void give(PageId page);
  void relabel(PageId page, Owner owner);
  // Makes a page in use free where it is mapped; and the reverse.
  void keep(PageId page);
  void claim(PageId page, Owner owner);

  // Tells the journal what there is now.
  void note() const {
    if (journal_ != nullptr) journal_->note(counts_);
  }
  // Throws InvariantBroken where the book does not add up.
  void check() const;

 private:
  struct Page {
    CUmemGenericAllocationHandle handle = 0;
    Owner owner = Owner::kFree;
    bool created = false;
    bool kept = false;
    unsigned mappings = 0;
  };

  void label(PageId page, Owner owner);
  void end_keeping(PageId page);

  Journal* const journal_;
  std::size_t created_ = 0, created_peak_ = 0;
  std::size_t kept_ = 0;
  std::array<std::size_t, kOwners> counts_{};
  std::vector<Page> pages_;
  std::set<PageId> free_;
  std::set<PageId> absent_;
};

}  // namespace ballonet
