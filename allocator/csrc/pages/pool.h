// A pool: the pages of one place (a device, or host memory), created and released under a budget.
//
// Words
//   budget   how many pages may exist. It may be lowered below what is in use: then no page is created until enough
//            have been given back, and each page given back meanwhile goes to the driver. A free page is not released
//            otherwise, because creating costs as much as mapping.
//
// Guarantees: no page is created above the budget, and none is idle while more exist than the budget allows, but for
// those that the driver does not take back; what fails to be created changes no owner.
//
// Lock: the mapper's, held by the caller, with the device's context current; what needs none says so.
#pragma once

#include <atomic>
#include <vector>

#include "driver/driver.h"
#include "pages/page_book.h"

namespace ballonet {

class Pool {
 public:
  Pool(const Driver& driver, const CUmemAllocationProp& place, std::size_t page_size, std::size_t budget,
       Journal* journal);

  // The pages and their owners. Idle ones are created and released through the pool.
  PageBook book;

  std::size_t budget() const { return budget_; }
  // More exists than the budget allows: what is given back goes to the driver. May be read without the mapper's lock.
  bool above_budget() const { return above_.load(std::memory_order_relaxed); }
  // Pages that may be created, and with those that are idle or kept: what can be had.
  std::size_t creatable() const {
    const std::size_t taken = book.created() + creating_;
    return budget_ > taken ? budget_ - taken : 0;
  }
  std::size_t available() const { return book.idle() + book.kept() + creatable(); }
  // Pages that have to be given back before `n` can be taken and no more exist than the budget allows.
  std::size_t missing(std::size_t n) const;

  // `n` pages for `owner`, idle or new, all or none; the first is `hint` where that is idle and the rest follow it as
  // far as they can, so that neighbours in address are neighbours in the pool. Throws PoolExhausted, DriverError.
  std::vector<PageId> take(std::size_t n, Owner owner, PageId hint = kNoPage);
  // Has `n` pages idle, or as many as the budget and the driver allow. Returns how many. Throws no PoolExhausted or
  // DriverError.
  std::size_t prepare(std::size_t n);
  // Prepares pages in steps, so that the driver creates them without the mapper's lock: `begin_creating` sets aside so
  // many of those that may be created, and says how many; `create` makes as many of them as the driver gives, and may
  // be called by any thread at any time; they are idle with `end_creating`.
  struct Creation {
    std::size_t pages = 0;
    CUmemAllocationProp place{};
    std::vector<CUmemGenericAllocationHandle> made;
  };
  Creation begin_creating(std::size_t n);
  void create(Creation& creation) const;
  void end_creating(const Creation& creation);
  // The page becomes idle, or goes back to the driver while the pool is above its budget. Pre: in use or kept, and no
  // mapping.
  void give(PageId page);

  // Releases free pages down to the new budget at once.
  void set_budget(std::size_t pages);
  // Releases free pages down to the present budget.
  void shrink();
  // Releases every free page that the driver takes back; returns how many are left.
  std::size_t release_free();

 private:
  void create_one(std::size_t wanted);
  CUresult create(CUmemGenericAllocationHandle& handle, CUmemAllocationProp& place) const;
  bool release_last();

  const Driver& driver_;
  CUmemAllocationProp place_;
  const std::size_t page_size_;
  std::size_t budget_;
  std::size_t creating_ = 0;
  std::atomic<bool> above_{false};
};

}  // namespace ballonet
