// Several threads and streams at once, through the entry points that torch calls and through ranges: every block and
// every piece is filled with a pattern of its own and verified when it is freed, while others trim, move pages and
// change the budget, and layers are taken whenever pages run out. Ends with the core's own integrity check and with
// every page back.
//
//   stress STANDIN.so THREADS OPERATIONS
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "device/registry.h"
#include "pattern.h"

using namespace ballonet;

namespace {

constexpr std::size_t kPage = 64 << 10;
constexpr std::size_t kBudget = 96;  // pages
constexpr std::size_t kLeastBudget = 48;
constexpr std::size_t kStreams = 3;
constexpr std::size_t kStep = 61;  // words between two that are looked at

[[noreturn]] void die(const char* what) {
  std::fprintf(stderr, "stress: %s\n", what);
  std::exit(1);
}

struct Block {
  std::uint64_t* words;
  std::size_t count;
  std::uint64_t number;
};

// Blocks that one thread allocates and another frees.
class Exchange {
 public:
  void put(Block block) {
    std::lock_guard<std::mutex> lock(mutex_);
    blocks_.push_back(block);
  }
  bool take(Block& block) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (blocks_.empty()) return false;
    block = blocks_.back();
    blocks_.pop_back();
    return true;
  }

 private:
  std::mutex mutex_;
  std::vector<Block> blocks_;
};

Exchange exchange;
std::atomic<std::uint64_t> numbers{1};
std::atomic<std::uint64_t> refused{0}, verified{0}, moved{0}, followed{0}, brought_back{0}, budgets_met{0}, spilled{0};
std::vector<void*> streams{nullptr};  // of the driver's, and the legacy one

// Streams of the device's own context, as torch makes them.
void make_streams(const Driver& driver) {
  CUdevice device = 0;
  CUcontext context = nullptr;
  driver.cuDeviceGet(&device, 0).or_throw();
  driver.cuDevicePrimaryCtxRetain(&context, device).or_throw();
  driver.cuCtxSetCurrent(context).or_throw();
  while (streams.size() < kStreams) {
    CUstream stream = nullptr;
    driver.cuStreamCreate(&stream, cuda::kStreamNonBlocking).or_throw();
    streams.push_back(stream);
  }
}

void release(const BallonetCore& core, Block block) {
  if (!holds(block.words, block.count, block.number, kStep)) die("a block does not hold what was written into it");
  ++verified;
  core.deallocate(block.words);
}

void allocate_and_free(const BallonetCore& core, unsigned seed, int operations) {
  std::mt19937 random(seed);
  std::vector<Block> mine;
  for (int i = 0; i < operations; ++i) {
    const unsigned dice = random() % 100;
    if (dice < 50) {
      // Sizes over five orders of magnitude: small blocks, blocks that share pages, blocks of several pages.
      const std::size_t size = 8 + random() % (std::size_t{64} << (random() % 13));
      void* block = nullptr;
      const int failed = core.allocate(size, 0, streams[random() % kStreams], &block);
      if (failed == 2) die(core.last_error());
      if (failed == 1) {
        ++refused;
        for (; !mine.empty(); mine.pop_back()) release(core, mine.back());
        continue;
      }
      const Block made{static_cast<std::uint64_t*>(block), size / 8, numbers++};
      fill(made.words, made.count, made.number, kStep);
      if (dice % 5 == 0) core.record_stream(block, streams[random() % kStreams]);
      (dice < 10 ? exchange.put(made) : mine.push_back(made));
    } else if (dice < 95) {
      Block other;
      if (dice < 60 && exchange.take(other)) {
        release(core, other);
      } else if (!mine.empty()) {
        std::swap(mine[random() % mine.size()], mine.back());
        release(core, mine.back());
        mine.pop_back();
      }
    } else if (dice < 97) {
      core.trim(0);
    } else if (!core.owns(mine.empty() ? nullptr : mine.back().words) && !mine.empty()) {
      die("a live block is not owned");
    }
  }
  for (const Block& block : mine) release(core, block);
}

// A range that was announced by another of its group comes, and goes.
void follow(Device& device, const std::shared_ptr<Group>& group, std::size_t pieces, std::size_t mapped) {
  const auto range = device.mapper->reserve(pieces, Owner::kKv, group, false, mapped);
  const auto words = reinterpret_cast<std::uint64_t*>(range->base);
  const std::size_t count = mapped * kPage / 8;
  try {
    device.map(*range, 0, mapped, Place::kDevice);
    const std::uint64_t number = numbers++;
    fill(words, count, number, kStep);
    if (!holds(words, count, number, kStep)) die("a range that follows does not hold what was written into it");
    ++followed;
  } catch (const PoolExhausted&) {
    ++refused;
  }
  device.mapper->close(*range);
}

// Another page with the same bytes takes the place of that of a piece, as when KV leaves the peer for the host.
void replace_page(Device& device, Range& range, std::size_t piece, Place place) {
  const auto spare = device.mapper->reserve(1, Owner::kKv, range.group);
  try {
    device.map(*spare, 0, 1, place);
    std::memcpy(reinterpret_cast<void*>(spare->base), reinterpret_cast<void*>(range.base + piece * kPage), kPage);
    if (device.mapper->aliasing.take_over(range, piece, *spare, 0, 1, range)) ++moved;
  } catch (const PoolExhausted&) {
    ++refused;
  }
  device.mapper->close(*spare);
}

// Ranges that grow, shrink and move under a lease, one after the other at the addresses that the one before has left,
// as KV caches do.
void grow_and_move(Device& device, unsigned seed, int operations) {
  std::mt19937 random(seed);
  const auto group = std::make_shared<Group>();
  constexpr std::size_t kPieces = 24, kWords = kPage / 8;
  auto range = device.mapper->reserve(kPieces, Owner::kKv, group, false, 0);
  const auto words = [&](std::size_t piece) { return reinterpret_cast<std::uint64_t*>(range->base + piece * kPage); };
  std::vector<std::uint64_t> tail;  // numbers of the pieces that are mapped, from the front
  for (int i = 0; i < operations / 4; ++i) {
    if (random() % 32 == 0) {
      device.mapper->close(*range);
      range = device.mapper->reserve(kPieces, Owner::kKv, group, false, random() % kPieces, random() % 6);
      tail.clear();
    }
    if (random() % 8 == 0) follow(device, group, kPieces, 1 + random() % 2);
    if (random() % 4 == 0)
      device.mapper->ahead.ask(range, tail.size(), std::min<std::size_t>(2, kPieces - tail.size()));
    group->enter();
    for (std::size_t piece = 0; piece < tail.size(); ++piece) {
      if (!holds(words(piece), kWords, tail[piece], kStep)) die("a piece does not hold what was written into it");
    }
    ++verified;
    const unsigned dice = random() % 10;
    try {
      if (dice < 5 && tail.size() < kPieces) {
        device.map(*range, tail.size(), 1, dice == 0 ? Place::kHost : dice == 1 ? Place::kPeer : Place::kDevice);
        tail.push_back(numbers++);
        fill(words(tail.size() - 1), kWords, tail.back(), kStep);
      } else if (dice < 8 && !tail.empty()) {
        const Place to = dice == 5 ? Place::kHost : dice == 6 ? Place::kPeer : Place::kDevice;
        if (device.mapper->moves.move(*range, random() % tail.size(), to)) ++moved;
      } else if (dice == 8 && !tail.empty()) {
        replace_page(device, *range, random() % tail.size(), random() % 2 == 0 ? Place::kHost : Place::kPeer);
      } else if (!tail.empty()) {
        const std::size_t keep = random() % tail.size();
        device.mapper->retire(*range, {{keep, tail.size() - keep}});
        tail.resize(keep);
      }
    } catch (const PoolExhausted&) {
      ++refused;
    }
    group->leave();
  }
  device.mapper->close(*range);
}

// A model whose layers lie in pages of their own or, when these were taken, lead to their twins; in any case they hold
// what was written. Its thread runs it under a lease, takes what others ask for, brings layers back, and says anew what
// may be taken, which replaces what all models said before.
class Model {
 public:
  Model(Device& device, unsigned index) : device_(device), random_(300 + index), first_key_(index * kLayers) {
    for (Layer& layer : layers_) {
      layer.range = device.mapper->reserve(kPieces, Owner::kWeights, group_);
      layer.twin = device.mapper->reserve(kPieces, Owner::kWeights, group_);
    }
  }
  ~Model() {
    device_.reclaim.withdraw(keys());
    for (Layer& layer : layers_) {
      device_.mapper->close(*layer.range);
      device_.mapper->close(*layer.twin);
    }
  }

  void run(int operations) {
    for (int i = 0; i < operations / 4; ++i) {
      group_->enter();
      for (const Layer& layer : layers_) {
        if (layer.number != 0 && !holds(words(layer.range), kWords, layer.number, kStep))
          die("a layer does not hold what was written into it");
      }
      ++verified;
      if (device_.reclaim.page_request() > 0) device_.reclaim.yield_pages();
      group_->leave();
      device_.reclaim.withdraw(keys());
      for (Layer& layer : layers_) {
        if (random_() % 2 == 0) bring_back(layer);
      }
      publish();
      device_.reclaim.taken();
    }
  }

 private:
  static constexpr std::size_t kLayers = 12, kPieces = 3, kWords = kPieces * kPage / 8;
  struct Layer {
    std::shared_ptr<Range> range, twin;
    std::uint64_t number = 0;  // of what was written; 0: nothing
  };

  static std::uint64_t* words(const std::shared_ptr<Range>& range) {
    return reinterpret_cast<std::uint64_t*>(range->base);
  }

  std::vector<std::int64_t> keys() const {
    std::vector<std::int64_t> keys;
    for (std::size_t i = 0; i < kLayers; ++i) keys.push_back(first_key_ + i);
    return keys;
  }

  // Pre: the layer is not published.
  void bring_back(Layer& layer) {
    try {
      if (layer.number == 0) {
        device_.map(*layer.range, 0, kPieces, Place::kDevice);
        layer.number = numbers++;
        fill(words(layer.range), kWords, layer.number, kStep);
      } else if (layer.range->leads_to(0) == LeadsTo::kAlias) {
        if (!device_.own(*layer.range, 0, kPieces)) return;
        std::memcpy(words(layer.range), words(layer.twin), kPieces * kPage);
        ++brought_back;
        if (random_() % 2 == 0) device_.mapper->retire(*layer.twin, {{0, kPieces}});  // else it is clean
      }
    } catch (const PoolExhausted&) {
      ++refused;
    }
  }

  void publish() {
    std::vector<Reclaim::Entry> entries;
    for (std::size_t i = 0; i < kLayers; ++i) {
      const Layer& layer = layers_[i];
      if (layer.number == 0) continue;
      entries.push_back({first_key_ + static_cast<std::int64_t>(i),
                         {group_, {{layer.range, 0, 1, layer.twin, 0, {}}, {layer.range, 1, 2, layer.twin, 1, {}}}},
                         std::nullopt});
    }
    std::shuffle(entries.begin(), entries.end(), random_);
    device_.reclaim.publish(std::move(entries));
  }

  Device& device_;
  std::mt19937 random_;
  const std::int64_t first_key_;
  const std::shared_ptr<Group> group_ = std::make_shared<Group>();
  Layer layers_[kLayers];
};

void change_budget(Device& device, const std::atomic<bool>& done, unsigned seed) {
  std::mt19937 random(seed);
  while (!done) {
    try {
      device.set_budget((kLeastBudget + random() % (kBudget - kLeastBudget)) * kPage, random() % 4 * 1'000'000);
      ++budgets_met;
    } catch (const BudgetInUse&) {
      // There is more in use, or the other thread has asked for another meanwhile.
    }
    device.check();
    for (const Events::Event& event : device.mapper->events.drain()) {
      if (event.kind == Events::Kind::kSpill) spilled += event.pages;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 4) die("usage: stress STANDIN.so THREADS OPERATIONS");
  Mapper::Options options;
  options.library = arguments[1];
  options.page_size = kPage;
  options.budget = kBudget;
  options.host_budget = 140;
  options.peer = 1;
  options.peer_budget = 16;
  const auto device = std::make_shared<Device>(options, true);
  bind(device);
  make_streams(Driver(options.library));
  const BallonetCore& core = *core_table();
  const int threads = std::atoi(arguments[2]), operations = std::atoi(arguments[3]);

  std::atomic<bool> done{false};
  std::vector<std::thread> workers;
  for (int i = 0; i < threads; ++i) {
    workers.emplace_back([&, i] {
      try {
        if (i % 3 == 0) allocate_and_free(core, 100 + i, operations);
        if (i % 3 == 1) grow_and_move(*device, 200 + i, operations);
        if (i % 3 == 2) Model(*device, i).run(operations);
      } catch (const std::exception& error) {
        die(error.what());
      }
    });
  }
  std::thread budget([&] { change_budget(*device, done, 7); }), another([&] { change_budget(*device, done, 8); });
  for (std::thread& worker : workers) worker.join();
  done = true;
  budget.join();
  another.join();
  device->set_budget(kBudget * kPage);
  for (Block block; exchange.take(block);) release(core, block);
  {
    Model last(*device, threads);  // however short the run was, layers were taken and brought back
    last.run(64);
    device->set_budget(0);
    device->set_budget(kBudget * kPage);
    last.run(64);
  }

  device->check();
  unbind(device);
  device->close();
  const auto numbers_left = device->mapper->numbers();
  if (numbers_left.created != 0 || numbers_left.host_created != 0) die("pages were left behind");
  if (verified == 0 || moved == 0 || followed == 0 || brought_back == 0 || budgets_met == 0)
    die("nothing was verified, moved or brought back, nothing followed, or no budget met: the run was too short");
  std::printf(
      "verified %llu, moved %llu, taken %zu, brought back %llu, spilled %llu, refused %llu: every page came back\n",
      static_cast<unsigned long long>(verified), static_cast<unsigned long long>(moved), device->reclaim.pages(),
      static_cast<unsigned long long>(brought_back), static_cast<unsigned long long>(spilled),
      static_cast<unsigned long long>(refused));
  return 0;
}
