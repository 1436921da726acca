// Several threads and streams at once, through the entry points that torch calls and through ranges: every block and
// every piece is filled with a pattern of its own and verified when it is freed, while others trim, move pages and
// change the budget. Ends with the core's own integrity check and with every page back.
//
//   stress STANDIN.so THREADS OPERATIONS
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "pattern.h"
#include "registry.h"

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
std::atomic<std::uint64_t> refused{0}, verified{0}, moved{0};
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

// A range that grows, shrinks and moves under a lease, as a KV cache does.
void grow_and_move(Device& device, unsigned seed, int operations) {
  std::mt19937 random(seed);
  const auto group = std::make_shared<Group>();
  constexpr std::size_t kPieces = 24, kWords = kPage / 8;
  const auto range = device.mapper->reserve(kPieces, Owner::kKv, group);
  const auto words = [&](std::size_t piece) { return reinterpret_cast<std::uint64_t*>(range->base + piece * kPage); };
  std::vector<std::uint64_t> tail;  // numbers of the pieces that are mapped, from the front
  for (int i = 0; i < operations / 4; ++i) {
    group->enter();
    for (std::size_t piece = 0; piece < tail.size(); ++piece) {
      if (!holds(words(piece), kWords, tail[piece], kStep)) die("a piece does not hold what was written into it");
    }
    ++verified;
    const unsigned dice = random() % 10;
    try {
      if (dice < 5 && tail.size() < kPieces) {
        device.map(*range, tail.size(), 1, dice == 0 ? Place::kHost : Place::kDevice);
        tail.push_back(numbers++);
        fill(words(tail.size() - 1), kWords, tail.back(), kStep);
      } else if (dice < 8 && !tail.empty()) {
        const Place to = dice == 5 ? Place::kHost : Place::kDevice;
        if (device.mapper->move(*range, random() % tail.size(), to)) ++moved;
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

void change_budget(Device& device, const std::atomic<bool>& done) {
  std::mt19937 random(7);
  while (!done) {
    device.set_budget((kLeastBudget + random() % (kBudget - kLeastBudget)) * kPage);
    device.check();
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  device.set_budget(kBudget * kPage);
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 4) die("usage: stress STANDIN.so THREADS OPERATIONS");
  Mapper::Options options;
  options.library = arguments[1];
  options.page_size = kPage;
  options.budget = kBudget;
  options.host_budget = 32;
  const auto device = std::make_shared<Device>(options);
  bind(device);
  make_streams(Driver(options.library));
  const BallonetCore& core = *core_table();
  const int threads = std::atoi(arguments[2]), operations = std::atoi(arguments[3]);

  std::atomic<bool> done{false};
  std::vector<std::thread> workers;
  for (int i = 0; i < threads; ++i) {
    workers.emplace_back([&, i] {
      try {
        i % 2 == 0 ? allocate_and_free(core, 100 + i, operations) : grow_and_move(*device, 200 + i, operations);
      } catch (const std::exception& error) {
        die(error.what());
      }
    });
  }
  std::thread budget([&] { change_budget(*device, done); });
  for (std::thread& worker : workers) worker.join();
  done = true;
  budget.join();
  for (Block block; exchange.take(block);) release(core, block);

  device->check();
  unbind(device);
  device->close();
  const auto numbers_left = device->mapper->numbers();
  if (numbers_left.created != 0 || numbers_left.host_created != 0) die("pages were left behind");
  if (verified == 0 || moved == 0) die("nothing was verified or nothing moved: the run was too short");
  std::printf("verified %llu, moved %llu, refused %llu: every page came back\n",
              static_cast<unsigned long long>(verified), static_cast<unsigned long long>(moved),
              static_cast<unsigned long long>(refused));
  return 0;
}
