// The pages of a device at their addresses, and the lock for changing them: all pages are mapped, opened and unmapped
// here, but for the one that is tried when the device is opened (context.h).
//
// Guarantees: each step changes what is mapped, the table and the pools' books together, or throws with all three as
// they were; so they agree whenever the lock is free, which `check` verifies. A page is behind one piece that owns it,
// or behind none and free; others may lead to it, and it is given back to its pool when the last of them does not.
//
// Lock: `mutex`, "the mapper's". Callers hold it, but where it says otherwise. One thread at a time touches the page
// tables for that, and no Python is called under it. Order: the heap's, the reclaim list's, a group's, that of moves
// (moves.h), this, that of requests (mapper.h).
//
// Note [Waiting]
// Work that may take long happens without the lock: waiting for streams, copies, and creating pages of the host, which
// pins memory. Others work on the same ranges meanwhile, so a thread that has waited looks again, with the lock, at all
// that it is about to change, and changes it without letting go of the lock again. What holds still meanwhile is what a
// lease protects: the group's lock is held throughout, so that no other thread begins to use its ranges. What is copied
// cannot lose its page: every fence covers the streams of copies. Nor is any lock held that a thread with the
// interpreter's lock may wait for: what is waited for may need that one to go on.
#pragma once

#include <array>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/fork.h"
#include "driver/context.h"
#include "mapping/range.h"
#include "pages/events.h"
#include "pages/pool.h"

namespace ballonet {

class Section;

class AddressSpace {
 public:
  struct Options {
    std::string library;
    int ordinal = 0;
    std::size_t page_size = 0;
    std::size_t budget = 0;       // pages
    std::size_t host_budget = 0;  // pages
    bool host_pages = true;       // may pages of the host stand behind addresses of the device?
    std::optional<int> peer;      // the device of the peer's pages
    std::size_t peer_budget = 0;  // pages
    BallonetStandinConfig standin{};
  };
  explicit AddressSpace(const Options& options);
  ~AddressSpace();  // no range is left
  AddressSpace(const AddressSpace&) = delete;
  AddressSpace& operator=(const AddressSpace&) = delete;

  Pool& pool(Place place) { return place == Place::kDevice ? device : place == Place::kHost ? host : peer; }
  CUdeviceptr address(const Stretch& stretch, std::size_t piece) const { return stretch.base + piece * page_size; }

  // Addresses for so many pages. Throws DriverError.
  Stretch reserve(std::size_t pieces) const;
  // Pre: nothing is mapped there. Post: `stretch` is empty.
  void free(Stretch& stretch) const;

  // Puts a page behind an unbacked piece, not open yet. Throws DriverError.
  void map(Stretch& stretch, std::size_t piece, const Target& target);
  // Gives access to neighbours that lead to pages of one place. Throws DriverError with some open or none.
  void open(Stretch& stretch, std::size_t first, std::size_t count);
  // Takes the page from its address; its owner stays. Throws DriverError.
  void unmap(Stretch& stretch, std::size_t piece);
  // Takes an unused page, retiring or kept, from its address: it is free once nothing leads to it. False where the
  // driver refuses.
  bool vacate(Stretch& stretch, std::size_t piece);
  // Takes a kept page from its address, with a second try. Throws DriverError.
  void vacate_kept(Stretch& stretch, std::size_t piece);

  // Retires the page of its owner; false where a tensor lies over the piece, which dooms it.
  bool retire(Stretch& stretch, std::size_t piece, std::uint32_t ticket);
  // The reverse.
  void revive(Stretch& stretch, std::size_t piece, Owner owner);
  // Frees the page where it is mapped. Pre: nothing else leads to it, and it is not in use.
  void keep(Stretch& stretch, std::size_t piece, bool ahead);
  void claim(Stretch& stretch, std::size_t piece, Owner owner);
  // A page that was given up is free if nothing leads to it any more; `discard` gives it up first.
  void release(Place place, PageId page);
  void discard(Place place, PageId page);

  // Has so many pages idle, or as many as can be had, and lets go of the lock while the driver creates them. Throws no
  // DriverError: the caller tries again.
  void prepare(Section& in, Place place, std::size_t pages);

  // A stretch of addresses that has device pages of its own.
  struct Owned {
    CUdeviceptr address;
    std::size_t size;  // bytes
    Owner owner;
  };
  struct DevicePages {
    std::vector<Owned> runs;                  // of weights and KV
    std::array<std::size_t, kOwners> counts;  // pages by owner
  };
  // Both at one moment. Takes the lock.
  DevicePages device_pages() const;
  // The range with this address, nullptr where there is none.
  const Range* range_at(CUdeviceptr address) const;
  // `others`: stretches that are no range's. Throws InvariantBroken.
  void check(const std::vector<const Stretch*>& others);

  const std::size_t page_size;
  mutable Mutex mutex;
  Journal journal;
  const Driver driver;
  const Context context;
  Pool device, host, peer;
  PageTable table;
  std::set<Range*> ranges;
};

// The mapper's lock and the device's context, for as long as it lives; `Unlocked` lets go of the lock in between.
class Section {
 public:
  explicit Section(AddressSpace& space) : Section(space, std::unique_lock<Mutex>(space.mutex)) {}
  Section(AddressSpace& space, std::unique_lock<Mutex> held)
      : scope_(space.driver, space.context.handle), lock(std::move(held)) {}
  Section(const Section&) = delete;
  Section& operator=(const Section&) = delete;

  Ranges ended;  // that may be the last of their kind: they go once the lock is released

 private:
  const DriverScope scope_;

 public:
  std::unique_lock<Mutex> lock;
};

}  // namespace ballonet
