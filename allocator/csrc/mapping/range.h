// A range: reserved addresses in page-sized pieces, a virtual tensor (eLLM §4.2: eTensor).
//
// Guarantees: its addresses are its own until it is closed and its last retirement is done; it lives at least that
// long, as retirements and tensors over it hold it.
//
// Lock: the mapper's, where it says so below; `addresses` and the members after it need it held.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <tuple>
#include <vector>

#include "pages/group.h"
#include "pages/page_table.h"

namespace ballonet {

class Mapper;

struct Span {
  std::size_t first, count;  // pieces of a range
};
using Spans = std::vector<Span>;

class Range : public std::enable_shared_from_this<Range> {
 public:
  // Makes a range of `addresses`, which may be for more pieces.
  Range(std::shared_ptr<Mapper> mapper, Stretch addresses, std::size_t pieces, Owner owner,
        std::shared_ptr<Group> group, bool auto_retire, bool keeps = false);
  ~Range();
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;

  const CUdeviceptr base;
  const std::size_t pieces;
  const Owner owner;
  const std::shared_ptr<Group> group;
  const bool auto_retire;  // a piece belongs to the tensors over it: it is retired with its last pin
  const bool keeps;        // pages that have retired are kept where they are while it is open
  const std::shared_ptr<Mapper> mapper;

  // These take the mapper's lock.
  LeadsTo leads_to(std::size_t piece);
  PageId page(std::size_t piece);
  // The place of the page that the piece leads to, also while it retires.
  std::optional<Place> place(std::size_t piece);
  // Pieces that lead to a page and are not retiring.
  std::size_t backed();
  // (first, count, leads to) of neighbours that lead to the same kind of page, of `count` pieces from `first` on.
  std::vector<std::tuple<std::size_t, std::size_t, LeadsTo>> runs(std::size_t first, std::size_t count);
  // Pins the pieces under [offset, offset + size). Throws UsageError where one of them is not backed.
  void pin(std::size_t offset, std::size_t size);
  void unpin(std::size_t offset, std::size_t size);
  // An open window keeps the addresses from other ranges, though the range is closed.
  void open_window();
  void close_window();

  // Takes the group's lock, before the mapper's. False where another thread holds a lease.
  bool may_change(std::unique_lock<std::mutex>& lease) const;

  // Under the mapper's lock.
  void check_span(std::size_t first, std::size_t count) const;  // throws UsageError
  Stretch addresses;
  bool closed = false;
  std::size_t windows = 0;    // that are open
  std::size_t followers = 0;  // ranges like this one that were announced; 0 once that has been passed on (mapper.h)
  std::weak_ptr<Range> next;  // the one that follows
};
using Ranges = std::vector<std::shared_ptr<Range>>;

}  // namespace ballonet
