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
// stream.
#pragma once

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
#include "mapper.h"
#include "reclaim.h"
#include "spans.h"

namespace ballonet {

struct MempoolId {
  std::uint64_t first = 0, second = 0;
  bool operator==(const MempoolId& other) const { return first == other.first && second == other.second; }
  bool operator<(const MempoolId& other) const { return std::tie(first, second) < std::tie(other.first, other.second); }
};

using StreamFilter = std::function<bool(CUstream)>;

class Heap {
 public:
  // Blocks below this have arenas of their own, so that a small live block does not hold a large block's page.
  static constexpr std::uint64_t kSmall = 1 << 20;
  static constexpr std::uint64_t kLargest = 1ULL << 45;

  Heap(std::shared_ptr<Mapper> mapper, Reclaim& reclaim);

  // Throws PoolExhausted with a message for the user. Pre: size > 0.
  void* allocate(std::size_t size, CUstream stream);
  // Unknown addresses are ignored. Throws nothing.
  void deallocate(void* address);
  void record_stream(void* address, CUstream stream);
  std::size_t block_size(void* address);

  void begin_pool(MempoolId pool, StreamFilter filter);
  void end_pool(MempoolId pool);
  void release_pool(MempoolId pool);

  // Every page that no live block lies on goes to the pool. Waits for the streams that used it; does nothing during a
  // stream capture.
  void trim_and_wait();
  // What an allocation that failed tells the user. Pre: the caller holds `mutex`.
  std::string exhausted(std::size_t asked, const std::string& reason);

  struct Numbers {
    std::uint64_t live, live_peak, requested, requested_peak, blocks, allocations, frees, hits;
    std::uint64_t allocated_total, freed_total, cached;
  };
  Numbers numbers_locked() const;  // pre: the caller holds `mutex`
  void reset_peaks();
  // Throws InvariantBroken.
  void check();
  // Retires every arena without live blocks; returns how many blocks are live.
  std::size_t close();

  // Held across a fork by the atfork handlers.
  std::mutex mutex;

 private:
  struct Key {
    CUstream stream;
    MempoolId pool;
    bool small;
    bool operator<(const Key& other) const {
      return std::tie(stream, pool, small) < std::tie(other.stream, other.pool, other.small);
    }
    bool operator==(const Key& other) const {
      return stream == other.stream && pool == other.pool && small == other.small;
    }
  };
  struct Arena {
    Arena(Heap* heap, Key key_, std::shared_ptr<Range> range_, std::uint64_t page)
        : key(key_), range(std::move(range_)), blocks(range->pieces * page, page) {
      HeapAddresses::all().add(range->base, range->base + range->pieces * page, heap);
    }
    ~Arena() {
      HeapAddresses::all().remove(range->base);
      range->mapper->close(*range);
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

  Arenas& arenas_for(const Key& key);
  Arena& add_arena(Arenas& arenas, const Key& key, std::uint64_t size);
  MempoolId pool_for(CUstream stream) const;
  Blocks::Block* allocate_slow(Arenas& arenas, const Key& key, std::uint64_t size, Arena*& arena);
  Blocks::Block* fit(Arenas& arenas, const Key& key, std::uint64_t size, Arena*& arena);
  void back(Arena& arena, const Blocks::Placement& placement);
  void settle();
  void give_back();
  void drop_released();
  std::size_t harvest(std::size_t pages, const Blocks::Block* keep_before, const Blocks::Block* keep_after);
  void reuse_passed();
  bool held(const Arena& arena) const;
  std::uint64_t allowance() const;

  std::shared_ptr<Mapper> mapper_;
  Reclaim& reclaim_;
  std::uint64_t page_;
  std::map<Key, Arenas> arenas_;
  Key hot_key_[2]{};
  Arenas* hot_[2] = {nullptr, nullptr};
  AddressMap live_;
  std::deque<Waiting> waiting_;
  std::unordered_map<Blocks::Block*, std::vector<CUstream>> users_;
  std::vector<std::pair<MempoolId, StreamFilter>> filling_;
  std::map<MempoolId, unsigned> pools_;  // torch pools that graphs may replay from
  Numbers numbers_{};
};

}  // namespace ballonet
