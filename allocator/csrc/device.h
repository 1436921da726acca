// The assembly: one device is a mapper (driver, pools, streams, page tables), the list of what may be reclaimed of it,
// and a heap above them. What crosses them is here: a range that finds no page makes the heap give up idle ones and
// then takes what was published, and so does a budget that shrinks.
#pragma once

#include <memory>
#include <string>

#include "heap.h"
#include "reclaim.h"

namespace ballonet {

class Device {
 public:
  explicit Device(const Mapper::Options& options);
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  // Mapper::map, once more after the heap gave up what it could, and again with what can be reclaimed. Throws
  // PoolExhausted with a message for the user.
  void map(Range& range, std::size_t first, std::size_t count, Place place);
  // Mapper::own in the same way.
  bool own(Range& range, std::size_t first, std::size_t count);
  // In bytes. Lowering gives free pages back at once, and then what can be reclaimed; the others as they become free.
  void set_budget(std::size_t bytes);
  // torch's empty_cache: idle pages go back to the pool, and free ones to the driver.
  std::size_t trim();
  // Throws UsageError while blocks are live or ranges open.
  void close();
  bool closed() const { return closed_; }
  void check();
  // Taken together: no allocation comes in between.
  std::pair<Mapper::Numbers, Heap::Numbers> numbers();

  const std::shared_ptr<Mapper> mapper;
  Reclaim reclaim;
  Heap heap;

 private:
  template <class Attempt>
  auto with_idle_pages(std::size_t pages, Attempt attempt) -> decltype(attempt());
  std::string host_exhausted(std::size_t pages, const std::string& reason);

  bool closed_ = false;
};

}  // namespace ballonet
