#include "pages/pool.h"

#include <algorithm>

#include "driver/context.h"

namespace ballonet {

Pool::Pool(const Driver& driver, const CUmemAllocationProp& place, std::size_t page_size, std::size_t budget,
           Journal* journal)
    : book(journal), driver_(driver), place_(place), page_size_(page_size), budget_(budget) {}

std::size_t Pool::missing(std::size_t n) const {
  const std::size_t allowed = book.idle() + book.kept() + budget_, wanted = n + book.created();
  return wanted > allowed ? wanted - allowed : 0;
}

std::vector<PageId> Pool::take(std::size_t n, Owner owner, PageId hint) {
  const std::size_t at_hand = book.idle() + creatable();
  if (n > at_hand) {
    throw PoolExhausted(format("%zu pages of %s asked for, %zu can be had", n, in_units(page_size_).c_str(), at_hand),
                        n, missing(n));
  }
  // Where a later creation fails, pages created before stay, free.
  while (book.idle() < n) create_one(n);
  return book.take(n, owner, hint);
}

std::size_t Pool::prepare(std::size_t n) {
  try {
    while (book.idle() < n && creatable() > 0) create_one(n);
  } catch (const std::runtime_error&) {
    // The caller has another place for the rest.
  }
  return std::min(n, book.idle());
}

void Pool::give(PageId page) {
  book.give(page);
  shrink();
  book.note();
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
                        wanted, wanted - book.idle());
  }
  driver_.judge(Fn::cuMemCreate, made).or_throw("creating a page");
  book.add(handle);
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
  for (CUmemGenericAllocationHandle handle : creation.made) book.add(handle);
  shrink();
  book.note();
}

// The free page of the highest id goes back to the driver. A release that fails is tried once more; a page that cannot
// be released stays free until the pool next shrinks.
bool Pool::release_last() {
  const PageId page = book.last_idle();
  const CUmemGenericAllocationHandle handle = book.handle(page);
  if (!driver_.cuMemRelease(handle).ok() && !driver_.cuMemRelease(handle).ok()) return false;
  book.remove(page);
  return true;
}

void Pool::set_budget(std::size_t pages) {
  budget_ = pages;
  shrink();
  book.note();
}

// From the highest id down, so that what remains is dense.
void Pool::shrink() {
  while (book.created() > budget_ && book.idle() > 0 && release_last()) {
  }
  above_.store(book.created() > budget_, std::memory_order_relaxed);
}

std::size_t Pool::release_free() {
  while (book.idle() > 0 && release_last()) {
  }
  shrink();
  book.note();
  return book.idle();
}

}  // namespace ballonet
