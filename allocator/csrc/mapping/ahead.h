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
#pragma once

#include <deque>
#include <memory>
#include <mutex>
#include <optional>

#include "mapping/mapping.h"

namespace ballonet {

class Ahead {
 public:
  Ahead(AddressSpace& space, Fences& fences, CachedRanges& cached, Mapping& mapping, Background& background)
      : space_(space), fences_(fences), cached_(cached), mapping_(mapping), background_(background) {}

  // Has the background back pieces of a range of KV, one after the other, with pages that are free or may be created.
  // Ends where there are none, where `limit` pages are unclaimed, or where the driver refuses. Throws UsageError.
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

}  // namespace ballonet
