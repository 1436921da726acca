// The one who touches the driver's page tables: it puts pages behind addresses and takes them away again.
//
// Words
//   range     reserved addresses in page-sized pieces, a virtual tensor (eLLM §4.2: eTensor)
//   backing   what a piece leads to: nothing (inaccessible), a page of the device, the host or the peer (context.h),
//             another range's page (alias), or a page that is retiring: still mapped, given up by its owner, waiting
//             for every stream to pass
//   pin       a tensor made over the piece is alive; a pinned piece is retired when its last pin goes
//   kept      the piece leads to a page that is free: whoever maps the piece claims it, with no driver call, and
//   whoever
//             needs pages takes it; see slots.h
//
// Note [Waiting]
// Whatever may take long happens without the mapper's lock: waiting for streams, copies, and creating pages of the
// host, which pins memory. Others work on the same ranges meanwhile, so that whoever has waited looks again, with the
// lock, at all that it is about to change, and changes it without letting go of the lock again. What holds still
// meanwhile is what a lease protects: the group's lock is held throughout, so that no other thread begins to use its
// ranges. What is copied cannot lose its page: every fence covers the streams of copies. Nor is any lock held that a
// thread with the interpreter's lock may wait for: what is waited for may need that one to go on.
//
// Note [Retiring]
// `retire` never waits. It labels the pages, makes a fence and queues both. What has passed is unmapped in the
// background, and by whoever needs pages before that (`reap`). A piece that is mapped again before that simply takes
// its page back, with no driver call. An unmap that fails leaves the piece in the queue for the next reap: a page is
// never forgotten.
#pragma once

#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <tuple>
#include <vector>

#include "background.h"
#include "context.h"
#include "events.h"
#include "fork.h"
#include "group.h"
#include "pool.h"
#include "slots.h"
#include "streams.h"

namespace ballonet {

class Mapper;

using Lock = std::unique_lock<std::mutex>;

// While it lives, the lock is released.
class Unlocked {
 public:
  explicit Unlocked(Lock& lock) : lock_(lock) { lock_.unlock(); }
  ~Unlocked() { lock_.lock(); }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  Lock& lock_;
};

// While it lives, what is added can be read although its pages are exchanged: see Note [Readers without a lease] in
// mapper_alias.cpp.
class Readable {
 public:
  Readable(const Driver& driver, std::size_t page_size) : driver_(driver), page_size_(page_size) {}
  ~Readable() {
    for (CUdeviceptr address : addresses_) driver_.hold(address, page_size_, false);
  }
  Readable(const Readable&) = delete;
  Readable& operator=(const Readable&) = delete;
  void add(CUdeviceptr address) {
    addresses_.push_back(address);
    driver_.hold(address, page_size_, true);
  }

 private:
  const Driver& driver_;
  const std::size_t page_size_;
  std::vector<CUdeviceptr> addresses_;
};

enum class Backing : std::uint8_t { kNone, kDevice, kHost, kPeer, kAlias, kRetiring, kKept };
enum class Place : std::uint8_t { kDevice, kHost, kPeer };

// A page of its own there.
constexpr Backing backing_of(Place place) {
  return place == Place::kDevice ? Backing::kDevice : place == Place::kHost ? Backing::kHost : Backing::kPeer;
}
constexpr bool has_own_page(Backing backing) {
  return backing == Backing::kDevice || backing == Backing::kHost || backing == Backing::kPeer;
}

// Is there a page behind the piece that its owner has not given up?
constexpr bool leads_somewhere(Backing backing) { return has_own_page(backing) || backing == Backing::kAlias; }

struct Span {
  std::size_t first, count;  // pieces of a range
};
using Spans = std::vector<Span>;

// Addresses, and what each piece of them leads to: a range's, or a slot's.
struct Stretch {
  struct Piece {
    PageId page = kNoPage;
    std::uint32_t ticket = 0;  // the retirement it waits in
    std::uint16_t pins = 0;
    Backing backing = Backing::kNone;
    Backing retiring_from = Backing::kNone;
    Place place = Place::kDevice;  // of the page
    bool open = false;             // access was given
    bool doomed = false;           // to be retired when the last pin goes
    bool ahead = false;            // kept because it was mapped ahead
    std::uint64_t changed = 0;     // when it last came to lead elsewhere, in changes of the mapper's
  };
  CUdeviceptr base = 0;
  std::size_t pieces = 0;    // 0: the addresses are someone else's now, or the driver's
  std::vector<Piece> table;  // grows on demand: a heap's range is far longer than what it ever uses
  std::size_t kept = 0;      // pieces that are
  std::size_t ahead = 0;     // of these, mapped ahead
  bool promised = false;     // a slot for a range that is about to come
};

class Range : public std::enable_shared_from_this<Range> {
 public:
  // Of addresses that may be for more pieces.
  Range(std::shared_ptr<Mapper> mapper, Stretch held, std::size_t pieces, Owner owner, std::shared_ptr<Group> group,
        bool auto_retire);
  ~Range();
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;

  const CUdeviceptr base;
  const std::size_t pieces;
  const Owner owner;
  const std::shared_ptr<Group> group;
  const bool auto_retire;  // a piece belongs to the tensors over it: it is retired with its last pin
  const std::shared_ptr<Mapper> mapper;

 private:
  friend class Mapper;
  using Piece = Stretch::Piece;
  Piece& at(std::size_t piece);
  Stretch held_;
  bool closed_ = false;
  std::size_t more_ = 0;       // ranges like this one that will follow; 0 once it is said
  std::weak_ptr<Range> next_;  // the one that does
};

// A copy of bytes between two addresses that the driver knows, or host memory.
struct Copy {
  CUdeviceptr to, from;
  std::size_t size;
};

// Weights, or other bytes, whose pages may be taken: they go to twins on the host, and their addresses lead there
// afterwards. See Note [Taking] and Note [Buffers] in mapper_take.cpp.
struct Takeable {
  struct Source {
    std::size_t offset;   // bytes from the beginning of the part
    CUdeviceptr address;  // registered memory, or bytes of the part itself
    std::size_t size;
  };
  struct Part {
    std::weak_ptr<Range> home;
    std::size_t first, count;
    std::weak_ptr<Range> twin;
    std::size_t twin_first;
    std::vector<Source> sources;  // of what the twin lacks; none: the part itself
    bool buffer = false;          // has no twin: homes of the other parts lead to its pages
  };
  std::shared_ptr<Group> group;  // of every home
  std::vector<Part> parts;
  std::uint64_t as_of = 0;  // the mapper's changes when it was admitted
};

// What came of taking, or would come.
struct Taken {
  enum class Fate {
    kTaken,   // `pages` of the device are free
    kLeased,  // another thread holds a lease on the group
    kLater,   // the host has no pages for the twin, a graph is being captured, or others lead to these pages
    kVoid     // never: a range is gone, or leads elsewhere than when this was admitted
  } fate;
  std::size_t pages;
  std::size_t lacking = 0;  // pages for twins that it takes
  bool kv = false;          // which may be the peer's
};

// Pages for twins that can be had.
struct Room {
  std::size_t host, peer;
  // Takes those of an entry out, the peer's first where they may lie there. False, and nothing taken, where there are
  // too few.
  bool holds(const Taken& found) {
    const std::size_t near = found.kv ? std::min(found.lacking, peer) : 0;
    if (found.lacking - near > host) return false;
    peer -= near;
    host -= found.lacking - near;
    return true;
  }
};

struct Copied {
  unsigned long long weights_h2d = 0, weights_d2h = 0, kv_h2d = 0, kv_d2h = 0;
  unsigned long long kv_p2d = 0, kv_d2p = 0, kv_p2h = 0;  // p: the peer
};

class Mapper : public std::enable_shared_from_this<Mapper> {
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
  explicit Mapper(const Options& options);
  ~Mapper();
  Mapper(const Mapper&) = delete;
  Mapper& operator=(const Mapper&) = delete;

  // Addresses for `pieces` pages. With `expected` those of a slot, where one fits: so many pieces will be mapped soon.
  // Of KV: `more` ranges of this size and group will follow, mapped as far as this one is at first; the background
  // makes slots for them. Throws DriverError, UsageError for 0.
  std::shared_ptr<Range> reserve(std::size_t pieces, Owner owner, std::shared_ptr<Group> group,
                                 bool auto_retire = false, std::optional<std::size_t> expected = {},
                                 std::size_t more = 0);
  // Backs pieces that are unbacked, kept or retiring; those already backed so are skipped. All or none.
  // `wait`: for pages that are retiring, where there are too few others. Throws PoolExhausted, DriverError, UsageError.
  void map(Range& range, std::size_t first, std::size_t count, Place place, bool wait = true);
  // Has so many pages of the host idle, or as many as can be had: `map` needs not wait for their memory to be pinned.
  void prepare_host(std::size_t pages);
  // Asks the background to back pieces of a range of KV before they are needed, one after the other, with pages that
  // are free or may be created. It ends where there are none, where `ahead_limit` pages are unclaimed, or where the
  // driver refuses, and tells nobody. Throws UsageError.
  void map_ahead(const std::shared_ptr<Range>& range, std::size_t first, std::size_t count);
  // eLLM §5.1: less than 50 MB.
  std::size_t ahead_limit() const { return std::max<std::size_t>(1, 50'000'000 / page_size); }
  // Pieces lead to the pages of `source`, whatever they led to before; pages of their own become free. Tensors may lie
  // there. All or none. False, and nothing changed, where pieces led elsewhere and another thread holds a lease or a
  // stream is being captured. Throws DriverError, UsageError.
  bool alias(Range& range, std::size_t first, Range& source, std::size_t source_first, std::size_t count);
  // The reverse: aliased pieces get device pages of their own, whose contents are undefined. Throws PoolExhausted too.
  bool own(Range& range, std::size_t first, std::size_t count);
  // Aliased pieces get the device pages of `spare` as their own, which hold the same bytes; `spare` has them no more.
  // All or none; false as for `alias`, and where tensors show those pages. Throws DriverError, UsageError.
  bool adopt(Range& range, std::size_t first, Range& spare, std::size_t spare_first, std::size_t count);
  // Pages of `spare` come to pieces of `twin`, whose own become free, and the same pieces of `home` lead there where
  // they led to those: all hold the same bytes, so that nothing that was admitted is void. `spare` has them no more.
  // All or none; false as for `alias`, and where others lead to these pages. Throws DriverError, UsageError.
  bool take_over(Range& twin, std::size_t first, Range& spare, std::size_t spare_first, std::size_t count, Range& home);
  // Unbacked pieces are skipped, pinned ones follow when their last pin goes, those mapped ahead are unclaimed like a
  // slot's from here on. Throws nothing of the driver's.
  void retire(Range& range, const Spans& spans);
  // Copies one piece to another page in `to` and maps that in its place. False where nothing was changed: no page is
  // free, the piece is not movable, or another thread holds a lease. Throws DriverError with nothing changed.
  bool move(Range& range, std::size_t piece, Place to);
  // `unseen`: streams may use it that were never seen.
  void close(Range& range, bool unseen = false);

  // Stamps it, so that any later change of a piece it names makes it void. False where it is void already. Throws
  // UsageError where it makes no sense.
  bool admit(Takeable& takeable);
  // What `take` would come to.
  Taken outlook(const Takeable& takeable);
  // All or none. `near`: may twins lie on the peer? Throws DriverError with nothing changed.
  Taken take(Takeable& takeable, bool near = true);
  // Of a divisible entry that was admitted: up to so many pieces that can be taken now, the first of all parts first,
  // as far as there is `room` for their twins. No parts where there are none.
  Takeable first_of(const Takeable& takeable, std::size_t most, Room room);
  // (first, count, backing) of neighbours that lead to the same kind of page, of `count` pieces from `first` on.
  std::vector<std::tuple<std::size_t, std::size_t, Backing>> runs(Range& range, std::size_t first, std::size_t count);
  // Throws InvariantBroken where nothing has changed since it was admitted and its pages are not what they were.
  void check(const Takeable& takeable);

  // Completes retirements, oldest first: those whose fences have passed, or all of them (blocks). Returns the pages
  // freed.
  std::size_t reap(bool wait);
  // Does what `map_ahead` and `reserve` asked for and the background has not done yet.
  void catch_up();
  // Until then retirements are completed by whoever calls, nothing is mapped ahead and no slot is kept.
  void start_background() { background_.start(); }
  void stop_background();

  // Pins the pieces under [offset, offset + size). Throws UsageError where one of them is not backed.
  void pin(Range& range, std::size_t offset, std::size_t size);
  void unpin(Range& range, std::size_t offset, std::size_t size);

  Backing backing(Range& range, std::size_t piece);
  PageId page(Range& range, std::size_t piece);
  // Stretches of addresses of weights and KV that have device pages of their own, and their bytes.
  std::vector<std::pair<CUdeviceptr, std::size_t>> pages_of_ranges();
  // Where the page is that the piece leads to, be it retiring.
  std::optional<Place> place(Range& range, std::size_t piece);
  // Pieces that lead to a page and are not retiring.
  std::size_t backed(Range& range);

  // Costs no lock where the stream has been noted.
  void note_stream(CUstream stream);
  // The same where the address lies in a range.
  void note_stream_at(CUdeviceptr address, CUstream stream);
  // A stream of the device's context, for as long as it is not destroyed.
  CUstream create_stream();
  void destroy_stream(CUstream stream);  // once its work is done
  // The streams of all copies between the device and the host or the peer: one for each direction. Throws DriverError.
  void open_transfer_streams();
  void note_use(CUdeviceptr address, std::size_t size, CUstream stream, bool write);
  // The same for whatever is backed of a range; where nobody checks the order, the stream is noted.
  void note_use(Range& range, CUstream stream, bool write);
  void synchronize();
  // A fence over some streams, for blocks used across streams; see heap.h.
  Fence fence_over(const std::vector<CUstream>& streams);
  bool fence_passed(Fence& fence);
  void fence_wait(Fence& fence);
  // The two halves of it, for a fence that may be gone by the time that it has passed.
  Awaited awaited(Fence& fence);
  void wait(const Awaited& awaited);
  void recycle(Fence& fence);
  // What `stream` is given from now on waits for the fence.
  void stream_waits(CUstream stream, const Fence& fence);
  // See Transfer::copy. Returns a fence behind the copies.
  Fence copy(const std::vector<Copy>& parts, std::optional<CUstream> after, Owner owner, Place to);
  bool capturing();
  // See Note [Fences and captures] in streams.h.
  void captures_may_begin();
  void captures_are_over(std::size_t count);
  // See Driver.
  void idle_at_fork(CUdeviceptr address, std::size_t size) const { driver_.idle_at_fork(address, size); }
  // See HostMemory.
  void register_host(const void* memory, std::size_t size);
  void unregister_host(const void* memory);

  void set_budget(std::size_t pages);
  // Gives back what exists above the budget, as far as it is free; is it met now?
  bool within_budget();
  // Free pages, of slots too, go back to the driver.
  void release_free();
  std::pair<std::size_t, std::size_t> free_memory();  // (free, total) as the driver counts
  // Throws InvariantBroken.
  void check();
  // Gives every page back to the driver. Throws UsageError while a range is open. Idempotent.
  void shutdown();

  struct Numbers {
    std::size_t budget, created, created_peak, host_created, host_budget, host_free, ranges;
    std::size_t peer_created, peer_budget, peer_free;
    std::array<std::size_t, kOwners> pages;
    Copied copied;
    std::size_t kept, ahead;  // of the free pages: in slots, mapped ahead
    Driver::PageTableTime time;
    std::size_t spilled;  // host pages that blocks of the heap lie on
  };
  Numbers numbers();
  void reset_peak();
  std::size_t available();
  // Retirements that are not done.
  std::size_t retiring();
  Room room_for_twins();
  // Device pages that have to be given back before `n` can be had.
  std::size_t missing(std::size_t n);
  bool above_budget() const { return device_.above_budget(); }

  Journal journal;
  Events events;
  const std::size_t page_size;
  const int ordinal;
  bool is_standin() const { return driver_.is_standin(); }
  // Can host memory be mapped at a device address? Where not, why.
  bool has_host_pages() const { return context_.host_pages; }
  const std::string& host_refused() const { return context_.host_refused; }
  // The device of the peer's pages, none where there is no peer; why there is none although one was asked for.
  std::optional<int> peer() const {
    return context_.peer_pages ? std::optional<int>(context_.peer_place.location.id) : std::nullopt;
  }
  const std::string& peer_refused() const { return context_.peer_refused; }
  std::size_t total_memory() const { return context_.total_memory; }

  std::mutex mutex;

 private:
  class Submitting;
  friend class Range;
  using Ranges = std::vector<std::shared_ptr<Range>>;
  struct Retirement {
    std::shared_ptr<Fence> fence;  // that of the next one too where it was not looked at before
    std::shared_ptr<Range> range;
    Spans spans;
    std::uint32_t ticket;
  };

  static constexpr std::size_t kRequests = 4096;  // that wait; more are not heard
  struct Ahead {                                  // pieces that are wanted, from `next` on
    std::weak_ptr<Range> range;
    std::size_t next, end;
  };
  struct Coming {  // ranges that will follow this one
    Range* like;
    Range* last;         // that came
    std::size_t left;    // how many
    std::size_t mapped;  // pieces of each that will be mapped at first
  };

  Pool& pool_of(Place place) { return place == Place::kDevice ? device_ : place == Place::kHost ? host_ : peer_; }
  Place place_of(const Pool& pool) const {
    return &pool == &device_ ? Place::kDevice : &pool == &host_ ? Place::kHost : Place::kPeer;
  }
  std::optional<Place> place_at(CUdeviceptr address);
  Room room_for_twins_locked() const;
  Pool& pool_of(const Range::Piece& piece) { return pool_of(piece.place); }
  CUdeviceptr address(const Range& range, std::size_t piece) const { return range.base + piece * page_size; }
  // What a piece leads to.
  struct Target {
    PageId page;
    Backing backing;
    Place place;
  };
  std::vector<PageId> take_pages(Pool& pool, std::size_t n, Owner owner, PageId hint, Ranges& done);
  void map_page(CUdeviceptr at, Pool& pool, PageId page);
  // Pages of one place. See Note [Host pages and the CPU] in context.h.
  void allow_access(CUdeviceptr at, std::size_t pages, Place place);
  void back(Range& range, const std::vector<std::size_t>& pieces, Pool& pool, const std::vector<PageId>& pages,
            Backing backing);
  bool may_change(Range& range, std::unique_lock<std::mutex>& lease);
  struct Pieces {
    std::vector<std::size_t> unbacked, claimed;
    std::vector<std::size_t> adopted;  // take back the page that they were about to lose
    bool elsewhere = false;            // one is about to lose a page of another place
  };
  Pieces pieces_to_back(Range& range, std::size_t first, std::size_t count, Backing wanted);
  // What pieces would lead to; was nothing there before, and is one of them about to lose a page?
  struct Led {
    std::vector<Target> targets;
    bool bare = true, retiring = false;
  };
  Led lead(Range& range, std::size_t first, Range& source, std::size_t source_first, std::size_t count);
  void await(Lock& lock, const Awaited& awaited);
  bool quiesce(Lock& lock);
  void prepare(Lock& lock, Pool& pool, std::size_t pages);
  bool covers(CUdeviceptr address) const;
  // What pieces of a range, from `first` on, are to lead to.
  struct Change {
    Range& range;
    std::size_t first;
    std::vector<Target> targets;
  };
  void exchange(const std::vector<Change>& changes);
  void show(Range& range, std::size_t index, const Target& target);
  void show_again(Range& range, std::size_t index, const Target& target);
  // The ranges of each part, to be let go of once the locks are released.
  struct Ends {
    std::shared_ptr<Range> home, twin;
    bool buffer;
    bool open() const { return home && !home->closed_ && (buffer || (twin && !twin->closed_)); }
  };
  // The pieces of a twin that lack their bytes, and the copies that bring them.
  struct Filling {
    Range& home;
    Range& twin;
    Place place;  // of their pages
    std::vector<std::size_t> pieces;
    std::vector<Copy> copies;
  };
  std::vector<Ends> ends_of(const Takeable& takeable);
  // The pages of an entry's buffers, and how often each is mapped as far as the entry knows.
  using Shared = std::map<PageId, unsigned>;
  Taken examine(const Takeable& takeable, const std::vector<Ends>& ends);
  Shared shared_by(const Takeable& takeable, const std::vector<Ends>& ends);
  bool goes(const Ends& ends, std::size_t piece, std::size_t twin_piece, std::uint64_t as_of);
  bool unchanged(const Takeable::Part& part, const Ends& ends, std::uint64_t as_of);
  bool unchanged(const Takeable& takeable, const std::vector<Ends>& ends, std::uint64_t as_of);
  bool sound(const Takeable::Part& part, const Ends& ends, const Shared& shared);
  bool sources_there(const Takeable::Part& part, const Range& home) const;
  Filling filling_of(const Takeable::Part& part, const Ends& ends, Place place, std::size_t& next, std::size_t most);
  void back(const std::vector<Filling>& fillings);
  void copy_in(Lock& lock, const std::vector<Filling>& fillings);
  void drop(const std::vector<Filling>& fillings, std::uint64_t as_of);
  bool registered(CUdeviceptr address, std::size_t size) const;
  PageId page_after(Range& range, std::size_t piece, Backing backing);
  void retire_locked(Range& range, const Spans& spans, bool unseen = false);
  // Ranges whose last retirement is done go to `done`, to be destroyed once the lock is released.
  std::size_t reap_locked(Ranges& done);
  // The same once every one of them has passed.
  std::size_t reap_waiting(Lock& lock, Ranges& done);
  void reap_later(Ranges& done);
  enum class Left { kNone, kSome, kRefused };
  Left finish_retired(Retirement& retirement, std::size_t most, std::size_t& freed);
  bool unmap_piece(Range& range, std::size_t piece);
  void release_page(Pool& pool, PageId page);
  void free_addresses(Stretch& stretch);
  void settle(Range& range);
  bool may_keep(const Range& range, const Range::Piece& piece);
  void keep(Range& range, std::size_t piece, bool ahead);
  void claim(Range& range, std::size_t piece);
  void forget_ahead(Stretch& stretch, std::size_t piece);
  bool let_go(Stretch& stretch, std::size_t piece);
  void unkeep(Range& range, std::size_t piece);
  void empty(Stretch& stretch, std::size_t idle, bool ahead);
  // Which kept pages may be taken away; each includes those before.
  enum class Take { kUnpromised, kNotAhead, kAll };
  void empty_slots(std::size_t idle, Take take);
  void shelve_passed(Ranges& done);
  Stretch slot_for(std::size_t pieces, std::size_t expected);
  void tell_followers(Range& range, std::size_t first, std::size_t count);
  void one_came(Range& range);
  void expect_no_more();
  std::size_t promise_slots();
  std::deque<Stretch>::iterator lacking_slot();
  Stretch reserved(std::size_t pieces);
  Background::Next work();
  Background::Next synchronize_streams(Lock& lock);
  bool work_ahead(Ranges& done);
  bool work_coming(Ranges& done);
  bool map_one_ahead(Range& range, std::size_t piece, Take take);
  // Waits for the copy stream and frees the scratch addresses; false where the driver refuses one of the two now.
  bool clear_scratch();
  void check_span(const Range& range, std::size_t first, std::size_t count) const;
  void forget(Range& range);
  void tell_idle();
  void count_copy(Owner owner, Place from, Place to, std::size_t size);

  Driver driver_;
  Context context_;
  Pool device_;
  Pool host_;
  Pool peer_;
  Streams streams_;
  CUstream to_device_ = nullptr, from_device_ = nullptr;
  Pool* scratch_pool_ = nullptr;  // what an unmap that failed left at the scratch addresses
  PageId scratch_page_ = kNoPage;
  std::deque<Retirement> retiring_;
  std::uint32_t next_ticket_ = 1;
  std::set<Range*> ranges_;
  std::map<CUdeviceptr, std::size_t> registered_;  // host memory, and its size
  std::uint64_t changes_ = 0;                      // how often a piece came to lead elsewhere; a move does not count
  Copied copied_;
  std::uint64_t submitted_ = 0;  // how often copies began to be submitted
  std::size_t submitting_ = 0;   // threads that submit copies now, without the lock
  bool shut_ = false;
  bool keeping_ = true;        // pages of ranges that are closed
  std::deque<Stretch> slots_;  // the oldest first
  std::optional<Coming> coming_;
  std::size_t ahead_ = 0;      // pages mapped ahead and not claimed
  std::mutex requests_mutex_;  // held for moments, so that asking never waits for the driver
  std::deque<Ahead> requests_;
  std::mutex scratch_mutex_;  // before the mapper's: one page at a time is copied there
  const HeldOverFork scratch_held_{ForkRank::kScratch, scratch_mutex_};
  const HeldOverFork held_{ForkRank::kMapper, mutex, [this] { tell_idle(); }};
  const HeldOverFork requests_held_{ForkRank::kRequests, requests_mutex_};
  Background background_{[this] {
    count_as_background();
    return work();
  }};
};

}  // namespace ballonet
