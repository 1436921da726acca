// The caching allocator under torch: blocks of any size cut from ranges whose pages come and go.
//
// Words
//   arena   one range and its blocks, for the allocations of one stream (and one torch memory pool) of one size class
//   trim    give the pages that lie wholly inside free blocks back to the pool
//
// Note [Packing]
// Blocks are cut at 512 bytes, not at pages: two large blocks share the page between them, so the waste is one partial
// page per arena and what fragmentation leaves. Addresses cost nothing, so a block that fits nowhere is placed where
// the fewest pages have to be backed, in a hole between blocks or at the end.
//
// Note [Growing]
// Before the pool creates pages beyond the peak of live bytes (and a small allowance), pages that lie idle inside free
// blocks are moved to where they are needed. So physical memory follows the peak of live bytes and not the sum of each
// stream's or each size's own peak. In steady state every allocation finds a free block that is backed and the driver
// is not called. During a stream capture nothing is moved: that would have to wait for a stream.
//
// Note [Streams]
// A block freed on its own stream is reused by that stream at once: the stream's order protects it. A block that was
// also used elsewhere (record_stream) waits for a fence on those streams. Pages that leave an arena wait for every
// stream. The per-thread default stream has one handle for all threads: its blocks lie beside those of the legacy
// stream, which is ordered with the work of each, and one that is freed waits for a fence there.
//
// Note [Nobody waits with the lock]
// Any thread may free a tensor, also one that holds the interpreter's lock, which what a stream does may need in turn.
// So whoever waits for a stream lets go of the heap's lock, and looks for its place anew afterwards.
//
// Note [Spilling]
// What no device page can be had for lies on host pages: slower to use, and valid. Such blocks have arenas of their
// own, which are asked last, so that nothing that is allocated lies there while there are device pages, and a host page
// goes as soon as no block lies on it. A live block stays where it is. To move its bytes one would have to know that
// nobody writes them meanwhile, and for a block no one says who uses it: there is no lease on a tensor, and another
// thread may be in the middle of an operator or launch one at any moment. So spilling is undone by freeing: what a
// forward spilled is back with its next allocation after the pressure is gone. A graph replays from its addresses for
// as long as it lives, so that nothing of a pool and nothing during a capture is spilled.
//
// Guarantees, which `check` verifies as far as books tell: every block that is live or free lies on backed pieces of
// its arena's range; an allocation that fails has taken nothing; a block is handed out again once all work that used it
// is ordered before what its next owner submits.
//
// Lock: `mutex`. What is public takes it, but for what says otherwise; what is private wants it held.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "address_map.h"
#include "entry.h"
#include "fork.h"
#include "mapper.h"
#include "reclaim.h"
#include "spans.h"
#include "usage.h"

namespace ballonet {

struct MempoolId {
  std::uint64_t first = 0, second = 0;
  bool operator==(const MempoolId& other) const { return first == other.first && second == other.second; }
  BallonetPool pair() const { return {first, second}; }
  bool operator<(const MempoolId& other) const { return std::tie(first, second) < std::tie(other.first, other.second); }
};

using Lock = std::unique_lock<std::mutex>;  // the heap's
using StreamFilter = std::function<bool(CUstream)>;

class Heap {
 public:
  // Blocks below this have arenas of their own, so that a small live block does not hold a large block's page.
  static constexpr std::uint64_t kSmall = 1 << 20;
  static constexpr std::uint64_t kLargest = 1ULL << 45;

  // `spill`: may blocks lie on host pages?
  Heap(std::shared_ptr<Mapper> mapper, Reclaim& reclaim, bool spill);

  // Throws PoolExhausted with a message for the user. Pre: size > 0.
  void* allocate(std::size_t size, CUstream stream);
  // Unknown addresses are ignored. Throws nothing.
  bool deallocate(void* address);  // false: unknown
  void record_stream(void* address, CUstream stream);
  std::size_t block_size(void* address);

  // What the filter says yes to comes from the pool. Throws UsageError where it is being filled already.
  void begin_pool(MempoolId pool, StreamFilter filter);
  void end_pool(MempoolId pool);
  // A pool keeps its pages for as long as it has users: `begin_pool` and `hold_pool` add one, `release_pool` takes one.
  void hold_pool(MempoolId pool);
  void release_pool(MempoolId pool);
  unsigned pool_users(MempoolId pool);
  // May what fits nowhere else lie in free blocks of this pool?
  void set_use_on_oom(MempoolId pool, bool use);

  // Which blocks of a pool are live. See Note [Checkpoints].
  struct Checkpoint {
    struct Live {
      std::uint64_t address, size, requested;
    };
    MempoolId pool;
    std::vector<Live> blocks;
  };
  // Throws UsageError where there is no such pool.
  Checkpoint checkpoint(MempoolId pool);
  struct Restored {
    std::vector<void*> freed, created;
  };
  // Throws UsageError with nothing changed.
  Restored restore(const Checkpoint& state);

  // Every segment and its blocks, in the order of their addresses, without those of ranges.
  struct Segment {
    BallonetSegment facts;
    std::vector<BallonetBlock> blocks;
  };
  std::vector<Segment> segments();
  bool find(const void* address, BallonetBlock& out);
  std::uint64_t largest_free();
  // Is told under the lock; nullptr: nobody.
  void observe(const BallonetObserver* observer);

  // Every page that no live block lies on goes to the pool; returns how many. Waits for the streams that used them;
  // does nothing during a stream capture.
  std::size_t trim_and_wait();
  // How many pages that would be. Waits likewise.
  std::size_t idle_pages();
  // Pages that no live block lies on go to the driver, as many as exist above the budget. `wait`: for the streams that
  // used them; not during a capture.
  void shrink(bool wait);
  // What an allocation that failed tells the user, which so many more pages would have served (0: not known). Pre: the
  // caller holds `mutex`.
  std::string exhausted(std::size_t asked, const std::string& reason, std::size_t missing = 0);

  struct Numbers {
    std::uint64_t live, live_peak, requested, requested_peak, blocks, allocations, frees, hits;
    std::uint64_t allocated_total, freed_total, cached;
    std::uint64_t retries, refusals, waits;  // allocations tried again, refused; how often all streams were waited for
    Usage usage[BALLONET_CLASSES];
  };
  Numbers numbers_locked() const;  // pre: the caller holds `mutex`
  void reset_peaks();
  // Throws InvariantBroken.
  void check();
  // Retires every arena without live blocks; returns how many blocks are live.
  std::size_t close();

  // Whoever limits the share of the device's memory wants to be refused beyond it, and not be served from the host.
  void allow_spilling(bool allowed) { limited_ = !allowed; }

  // Called once, when the first block is spilled, under locks.
  static std::atomic<void (*)()> on_spill;

  std::mutex mutex;

 private:
  struct Key {
    CUstream stream;
    MempoolId pool;
    bool small;
    Place place = Place::kDevice;
    bool operator<(const Key& other) const {
      return std::tie(stream, pool, small, place) < std::tie(other.stream, other.pool, other.small, other.place);
    }
    bool operator==(const Key& other) const {
      return stream == other.stream && pool == other.pool && small == other.small && place == other.place;
    }
  };
  struct Arena {
    Arena(Heap* heap, Key key_, std::shared_ptr<Range> range_, std::uint64_t page)
        : key(key_), range(std::move(range_)), blocks(range->pieces * page, page) {
      HeapAddresses::all().add(range->base, range->base + range->pieces * page, heap);
    }
    ~Arena() {
      HeapAddresses::all().remove(range->base);
      range->mapper->close(*range, !(key.pool == MempoolId{}));  // graphs are replayed on any stream
    }
    Key key;
    std::shared_ptr<Range> range;
    Blocks blocks;
  };
  struct Waiting {
    Fence fence;
    Blocks::Block* block;
  };
  using Arenas = std::vector<std::unique_ptr<Arena>>;

  std::string out_of_memory(std::size_t asked);
  Arenas& arenas_for(const Key& key);
  Arena& add_arena(Arenas& arenas, const Key& key, std::uint64_t size);
  MempoolId pool_for(CUstream stream) const;
  Blocks::Block* allocate_slow(Lock& lock, const Key& key, std::uint64_t size, Arena*& arena);
  Blocks::Block* fit(Lock& lock, const Key& key, std::uint64_t size, Arena*& arena);
  Blocks::Block* fit_with_reclaimed(Lock& lock, const Key& key, std::uint64_t size, Arena*& arena);
  Blocks::Block* spill(Lock& lock, const Key& key, std::uint64_t size, Arena*& arena, std::string& reason);
  bool back(Arena& arena, const Blocks::Placement& placement, bool may_harvest);
  void use_on(Blocks::Block* block, CUstream stream);
  std::size_t settle(Lock& lock);
  void settle_waiting(Lock& lock);
  void give_back();
  void drop_released();
  std::size_t harvest(std::size_t pages, const Blocks::Block* keep_before, const Blocks::Block* keep_after);
  void release(Blocks::Block* block);
  void reuse_passed();
  void tell_idle() const;
  bool held(const Arena& arena) const;
  void tell_mapped(const Arena& arena, const Span& span);
  void tell_unmapped(const Arena& arena, const Span& span);
  Blocks::Block* best_fit(Arenas& arenas, std::uint64_t size, Arena*& arena);
  Blocks::Block* fallback(const Key& key, std::uint64_t size, Arena*& arena);
  void* hand_out(Arena& arena, Blocks::Block* block, std::uint64_t requested);
  void take_back(Blocks::Block* block);
  void tell_all_unmapped(const Arena& arena);
  Arena* arena_at(MempoolId pool, std::uint64_t address);
  std::uint64_t allowance() const;

  const HeldOverFork held_{ForkRank::kHeap, mutex, [this] { tell_idle(); }};
  std::shared_ptr<Mapper> mapper_;
  Reclaim& reclaim_;
  const bool spill_;
  std::atomic<bool> limited_{false};
  std::uint64_t page_;
  std::map<Key, Arenas> arenas_;
  Key hot_key_[2]{};
  Arenas* hot_[2] = {nullptr, nullptr};
  AddressMap live_;
  std::deque<Waiting> waiting_;
  std::unordered_map<Blocks::Block*, std::vector<CUstream>> users_;
  std::vector<std::pair<MempoolId, StreamFilter>> filling_;
  struct Pooled {
    unsigned users = 0;
    bool use_on_oom = false;
  };
  std::map<MempoolId, Pooled> pools_;  // torch pools that graphs may replay from
  const BallonetObserver* observer_ = nullptr;
  std::uint64_t hits_ = 0, retries_ = 0, refusals_ = 0, waits_ = 0;
  HeapUsage usage_;
};

}  // namespace ballonet
