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

#include "mappings.h"
#include "uses.h"

namespace ballonet::standin {

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
