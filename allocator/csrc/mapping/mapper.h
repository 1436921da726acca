// The assembly of the parts that put pages behind addresses. Each part uses only those before it.
//
//   space       pages, addresses and the table between them, under the one lock (address_space.h)
//   fences      streams, and waiting for their work
//   cached      free pages that stay where they are mapped
//   retirement  pages that wait for streams before they are unmapped
//   mapping     pages of a range's own, and where they come from
//   aliasing    pages of another range
//   copies      copies beside the work of other streams, and registered host memory
//   moves       bytes to another page under the same address
//   takes       pages under what is in use, for the reclaim list
//   ahead       pages mapped before they are needed
//
// Callers use a part directly. Work of several parts together is here: how a range begins and ends, the budget, the
// background thread, the shutdown.
//
// Guarantees: a failure changes no owner of a page; `check` checks every part.
//
// Lock: everything here takes the mapper's, `space.mutex`, itself. No caller holds it.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>

#include "base/fork.h"
#include "mapping/mapping.h"
#include "mapping/moves.h"
#include "mapping/takes.h"
#include "pages/events.h"

namespace ballonet {

// Pages that are mapped before they are needed: those requested with `ask`, and cached ranges for ranges that are about
// to come.
//
// Note [Ranges to come]
// The first prefill of a process finds no cached ranges, and each layer's range would wait for its pages when it comes.
// But the layers of a cache are alike: once the first has its pages it is known how many the others will want, and
// while a layer is computed there is time to map those of the next. So the reservation of the first range says how many
// will follow, and the background makes cached ranges for them, from pages that are free or may be created, no more
// than `limit` at a time: a range that comes takes its own and makes room for the next. Nothing is made that will not
// be used, and what was promised and does not come (a forward that fails) is an ordinary cached range once the first
// range is closed. One cache at a time is served, the one that asked last; others map as they go.
//
// Creating pages ahead without mapping them needs no such limit, and is not worth it: of the time that a page costs on
// CUDA that is a quarter, access is the rest. Nor can activations be had ahead: a first layer asks for all of theirs
// within a millisecond, and their number is not known before.
//
// Guarantees: no more than `limit` pages are mapped ahead and unclaimed, and each is free for any other need. Where
// pages cannot be had, none are mapped, with no error.
//
// Lock: the mapper's, held by the caller, but for `ask`: that takes one of its own, which is held for moments, so that
// asking never waits for the driver.

class Ahead {
 public:
  Ahead(AddressSpace& space, Fences& fences, CachedRanges& cached, Mapping& mapping, Background& background)
      : space_(space), fences_(fences), cached_(cached), mapping_(mapping), background_(background) {}

  // Has the background back pieces of a range of KV or weights, one after the other, with pages that are free or may be
  // created. Ends where there are none, where `limit` pages are unclaimed, or where the driver refuses. UsageError.
  void ask(const std::shared_ptr<Range>& range, std::size_t first, std::size_t count);
  // eLLM §5.1: less than 50 MB.
  std::size_t limit() const;

  // Notes that a range that wants a cached one was reserved, announced or not.
  void one_came(Range& range);
  // Notes that pieces of a range of KV were mapped: those that follow it will want as many.
  void tell_followers(Range& range, std::size_t first, std::size_t count);
  // Notes that a range was closed, or is gone.
  void one_ended(const Range& range);
  void expect_no_more();
  // Drops all requests.
  void forget_requests();

  bool wanted() const;
  // Maps one piece of the oldest request. False where there is none.
  bool serve_request(Section& in);
  // Maps one page for the ranges to come. False where none is lacking, or none can be had.
  bool serve_coming(Section& in, Mapper& mapper);
  void check() const;  // throws InvariantBroken

 private:
  struct Request {  // pieces that are wanted, from `next` on
    std::weak_ptr<Range> range;
    std::size_t next, end;
  };
  struct Coming {  // ranges that will follow this one
    Range* like;
    Range* last;         // that came
    std::size_t left;    // how many
    std::size_t mapped;  // pieces of each that will be mapped at first
  };
  bool push(Request request);
  bool map_one(Range& range, std::size_t piece, CachedRanges::Take take);

  AddressSpace& space_;
  Fences& fences_;
  CachedRanges& cached_;
  Mapping& mapping_;
  Background& background_;
  std::optional<Coming> coming_;
  mutable std::mutex mutex_;  // of the requests
  std::deque<Request> requests_;
  const HeldOverFork held_{ForkRank::kRequests, mutex_};
};

class Mapper : public std::enable_shared_from_this<Mapper> {
 public:
  using Options = AddressSpace::Options;
  explicit Mapper(const Options& options);
  ~Mapper();
  Mapper(const Mapper&) = delete;
  Mapper& operator=(const Mapper&) = delete;

  // Addresses for `pieces` pages. With `expected` those of a cached range, where one fits: so many pieces will be
  // mapped soon. Of KV: `more` ranges of this size and group will follow, mapped as far as this one is at first; the
  // background makes cached ranges for them. Throws DriverError, UsageError for 0.
  std::shared_ptr<Range> reserve(std::size_t pieces, Owner owner, std::shared_ptr<Group> group,
                                 bool auto_retire = false, std::optional<std::size_t> expected = {},
                                 std::size_t more = 0, bool keeps = false);
  // Backs pieces; see Mapping::map.
  void map(Range& range, std::size_t first, std::size_t count, Place place, bool wait = true);
  // Retires pieces; see Retirement::retire. Throws UsageError.
  void retire(Range& range, const Spans& spans);
  // `unseen`: streams may use it that were never seen. Idempotent.
  void close(Range& range, bool unseen = false);

  // Completes retirements, oldest first: those whose fences have passed, or all of them (blocks). Returns the pages
  // freed.
  std::size_t reap(bool wait);
  // The number of retirements that are not done.
  std::size_t retiring() {
    const std::lock_guard lock(space.mutex);
    return retirement.size();
  }
  // Does the mapping ahead that the background has not done yet.
  void catch_up();
  // Ends the background thread. From here on, as before `background.start()`, retirements are completed by callers,
  // nothing is mapped ahead and no range is cached.
  void stop_background();

  void set_budget(std::size_t pages);
  // How often the budget became larger.
  std::size_t raises() const { return raises_.load(); }
  // Gives back free pages above the budget. Is it met now?
  bool within_budget();
  // Gives free pages, of cached ranges too, back to the driver.
  void release_free();
  std::pair<std::size_t, std::size_t> free_memory();  // (free, total) as the driver counts
  std::size_t available() {
    const std::lock_guard lock(space.mutex);
    return space.device.available();
  }
  // Device pages that have to be given back before `n` can be had.
  std::size_t missing(std::size_t n) {
    const std::lock_guard lock(space.mutex);
    return space.device.missing(n);
  }

  struct Numbers {
    std::size_t budget, created, created_peak, host_created, host_budget, host_free, ranges;
    std::size_t peer_created, peer_budget, peer_free;
    std::array<std::size_t, kOwners> pages;
    Copied copied;
    std::size_t kept, ahead;  // of the free pages: in cached ranges, mapped ahead
    Driver::PageTableTime time;
    std::size_t spilled;  // host pages that blocks of the heap lie on
  };
  Numbers numbers();
  void reset_peak() {
    const std::lock_guard lock(space.mutex);
    space.device.book.reset_peak();
  }
  // Throws InvariantBroken.
  void check();
  // Gives every page back to the driver. Throws UsageError while a range is open. Idempotent.
  void shutdown();

  Events events;
  AddressSpace space;
  Background background{[this] {
    count_as_background();
    return work();
  }};
  Fences fences{space, background};
  CachedRanges cached{space};
  Retirement retirement{space, fences, cached, background};
  Mapping mapping{space, fences, cached, retirement};
  Aliasing aliasing{space, fences, retirement, mapping};
  Copies copies{space, fences};
  Moves moves{space, fences, retirement, mapping, copies};
  Takes takes{space, fences, retirement, mapping, copies};
  Ahead ahead{space, fences, cached, mapping, background};

 private:
  friend class Range;
  void forget(Range& range);
  void tell_idle();
  Background::Next work();

  std::atomic<std::size_t> raises_{0};
  bool shut_ = false;
  const HeldOverFork held_{ForkRank::kMapper, space.mutex.over_fork(), [this] { tell_idle(); }};
};

}  // namespace ballonet
