// A pool: the pages of one place (a device, or host memory), each with exactly one owner, under a budget.
//
// Words
//   page     one driver handle of page_size bytes; its id is its index here and never changes while it exists
//   absent   an id whose handle is not created; costs nothing
//   free     created, owned by no one; not released, because creating costs as much as mapping
//   kept     free, and still behind an address, where it may be claimed without the driver; see slots.h
//   budget   how many pages may exist. It may be lowered below what is in use: then no page is created until enough
//            have been given back, and each page given back meanwhile goes to the driver.
//
// Guarantees, which `check` verifies: free, owned and retiring pages add up to those that exist; a free page that is
// not kept is behind no address.
//
// Lock: the mapper's, held by the caller, with the device's context current; what needs none says so.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <set>
#include <vector>

#include "driver.h"
#include "journal.h"
#include "page.h"

namespace ballonet {

class Pool {
 public:
  Pool(const Driver& driver, const CUmemAllocationProp& place, std::size_t page_size, std::size_t budget,
       Journal* journal);

  std::size_t page_size() const { return page_size_; }
  std::size_t budget() const { return budget_; }
  std::size_t created() const { return created_; }
  std::size_t created_peak() const { return created_peak_; }
  void reset_peak() { created_peak_ = created_; }
  const std::array<std::size_t, kOwners>& counts() const { return counts_; }
  std::size_t count(Owner owner) const { return counts_[static_cast<std::size_t>(owner)]; }
  // More exists than the budget allows: what is given back goes to the driver. May be read without the mapper's lock.
  bool above_budget() const { return above_.load(std::memory_order_relaxed); }
  // Free pages behind no address, those that are kept, and pages that may be created: together `available`.
  std::size_t idle() const { return free_.size(); }
  std::size_t kept() const { return kept_; }
  std::size_t creatable() const { return budget_ > created_ + creating_ ? budget_ - created_ - creating_ : 0; }
  std::size_t available() const { return idle() + kept() + creatable(); }
  // Pages that have to be given back before `n` can be taken and no more exist than the budget allows.
  std::size_t missing(std::size_t n) const;

  // `n` pages for `owner`, idle or new, all or none; the first is `hint` where that is idle and the rest follow it as
  // far as they can, so that neighbours in address are neighbours in the pool. Throws PoolExhausted, DriverError.
  std::vector<PageId> take(std::size_t n, Owner owner, PageId hint = kNoPage);
  // Has `n` pages idle, or as many as the budget and the driver allow; how many of them are. Throws nothing of theirs.
  std::size_t prepare(std::size_t n);
  // The same in steps, so that the driver creates them without the mapper's lock: `begin_creating` sets aside so many
  // of those that may be created, and says how many; `create` makes as many of them as the driver gives, and may be
  // called by any thread at any time; they are idle with `end_creating`.
  struct Creation {
    std::size_t pages = 0;
    CUmemAllocationProp place{};
    std::vector<CUmemGenericAllocationHandle> made;
  };
  Creation begin_creating(std::size_t n);
  void create(Creation& creation) const;
  void end_creating(const Creation& creation);
  // The page becomes free, or goes back to the driver while the pool is above its budget. Pre: not free, no mapping.
  void give(PageId page);
  void relabel(PageId page, Owner owner);
  // A page in use becomes free and stays where it is mapped.
  void keep(PageId page);
  // The reverse.
  void claim(PageId page, Owner owner);
  // A kept page is idle. Pre: no mapping.
  void let_go(PageId page);
  bool kept(PageId page) const { return pages_[page].kept; }

  Owner owner(PageId page) const { return pages_[page].owner; }
  CUmemGenericAllocationHandle handle(PageId page) const { return pages_[page].handle; }
  unsigned& mappings(PageId page) { return pages_[page].mappings; }

  // Releases free pages down to the new budget at once.
  void set_budget(std::size_t pages);
  // The same for the budget as it is.
  void shrink();
  // Releases every free page that the driver takes back; returns how many are left.
  std::size_t release_free();
  // Throws InvariantBroken where the books do not add up.
  void check() const;

 private:
  struct Page {
    CUmemGenericAllocationHandle handle = 0;
    Owner owner = Owner::kFree;
    bool created = false;
    bool kept = false;
    unsigned mappings = 0;
  };

  void create_one(std::size_t wanted);
  CUresult create(CUmemGenericAllocationHandle& handle, CUmemAllocationProp& place) const;
  void add(CUmemGenericAllocationHandle handle);
  bool release_one(PageId page);
  void label(PageId page, Owner owner);

  const Driver& driver_;
  CUmemAllocationProp place_;
  std::size_t page_size_;
  std::size_t budget_;
  Journal* journal_;
  std::size_t created_ = 0;
  std::size_t creating_ = 0;
  std::size_t created_peak_ = 0;
  std::atomic<bool> above_{false};
  std::size_t kept_ = 0;
  std::array<std::size_t, kOwners> counts_{};
  std::vector<Page> pages_;
  std::set<PageId> free_;
  std::set<PageId> absent_;
};

}  // namespace ballonet
