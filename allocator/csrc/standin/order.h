// Is every use ordered? Vector clocks over the streams, the host and the events between them.
//
// Note [Why]. CPU operators finish before they return, so a forgotten wait changes no result here; on a GPU it is
// corruption. So every use of the pool's bytes is stamped, clocks travel only by what orders work on a GPU (an event
// recorded and waited for, a synchronisation), and a use, a copy or an unmap that nothing orders after an earlier
// conflicting use is refused.
//
// Stream 0 is no exception: that its work is in fact complete counts for nothing until an event says so. Neither does
// the legacy default stream's implicit waiting on blocking streams: ballonet's streams are non-blocking. All threads
// are one host.
//
// Conflicts are looked for by physical bytes, so that they are seen through aliases. An unmap takes away one address,
// so it asks for uses through that address only.
//
// Lock: the stand-in's (state.h), held by the caller.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include "mappings.h"

namespace ballonet::standin {

// An interval map of stamps: the last uses of bytes.
//
// Words
//   stamp    (stream, epoch): a use by that stream between two of its publications
//   clock    per stream, the newest epoch known to have passed; a stamp is covered by a clock that reaches its epoch
//
// Note [Why it stays small]. An epoch ends only where the stream publishes its clock (an event recorded, a
// synchronisation), so what a stream does in between has one stamp and neighbours join into one interval: a range of a
// gigabyte is one node. A write replaces what was there, as it had to be ordered after it. And a stamp that the host
// knows to have passed can never matter again, since every submission inherits the host's clock: such stamps are
// dropped when they are met, and by a sweep once the map has doubled. All of it is exact; nothing is rounded.
//
// Lock: the stand-in's (state.h), held by the caller.

using Clock = std::vector<std::uint64_t>;  // by stream index; missing = 0

struct Stamp {
  std::uint32_t stream = 0;
  std::uint64_t epoch = 0;  // 0 = no use
  bool operator==(const Stamp& other) const { return stream == other.stream && epoch == other.epoch; }
};

inline bool covers(const Clock& clock, const Stamp& stamp) {
  return stamp.epoch == 0 || (stamp.stream < clock.size() && clock[stamp.stream] >= stamp.epoch);
}

struct Conflict {
  std::uint64_t from, to;  // the bytes, clipped to those asked for
  Stamp earlier;
  bool earlier_wrote;
};

class Uses {
 public:
  // The first use of [from, to) by another stream that `clock` does not cover and that a use by `stream` must come
  // after: every write, and every read too if `write`. False where there is none.
  bool conflict(std::uint64_t from, std::uint64_t to, std::uint32_t stream, const Clock& clock, bool write,
                Conflict* found) const;
  // The first use of [from, to) by any stream that `clock` does not cover.
  bool uncovered(std::uint64_t from, std::uint64_t to, const Clock& clock, Conflict* found) const;
  // Notes a use. `host` is the host's clock, for what may be dropped.
  void stamp(std::uint64_t from, std::uint64_t to, Stamp use, bool write, const Clock& host);
  void forget(std::uint64_t from, std::uint64_t to);

 private:
  struct Interval {
    std::uint64_t to;
    Stamp write;               // the last one
    std::vector<Stamp> reads;  // since then, one per stream
    bool same_uses(const Interval& other) const { return write == other.write && reads == other.reads; }
    bool unused() const { return write.epoch == 0 && reads.empty(); }
  };
  using Map = std::map<std::uint64_t, Interval>;

  Map::const_iterator first_touching(std::uint64_t from) const;
  Map::iterator cut(std::uint64_t at);
  Map::iterator join_before(Map::iterator at);
  static void drop_covered(Interval& interval, const Clock& host);
  void sweep(const Clock& host);

  Map intervals_;
  std::size_t sweep_at_ = 1024;
};

CUstream stream_handle(std::uint32_t index);  // what users hold; index 0 is the NULL stream

struct Use {
  std::uint64_t address, size;
  const std::vector<Run>* runs;
  bool write;
};

class Order {
 public:
  Order() { add_stream(); }
  std::uint32_t add_stream();
  // Success where every use is ordered after what it conflicts with; all of them are then stamped.
  CUresult submit(const char* function, std::uint32_t stream, const Use* uses, std::size_t count);
  // Returns the stream's clock as of now, for what waits for it.
  Clock publish(std::uint32_t stream);
  Clock publish_all();  // the same of all streams
  void join_stream(std::uint32_t stream, const Clock& clock);
  void join_host(const Clock& clock);
  CUresult may_unmap(std::uint64_t address, std::uint64_t size) const;
  void unmapped(std::uint64_t address, std::uint64_t size) { by_address_.forget(address, address + size); }

 private:
  struct Stream {
    Clock clock;              // epochs of others that its coming work is ordered after
    std::uint64_t epoch = 1;  // the running one
    bool used = false;        // anything stamped with it?
  };
  Uses& by_store(Store store) { return physical_[static_cast<int>(store)]; }

  Clock host_;
  std::vector<Stream> streams_;  // by index; an index is never reused
  Uses physical_[kStores];
  Uses by_address_;
};

}  // namespace ballonet::standin
