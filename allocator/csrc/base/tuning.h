// Every number of the core that decides something: its unit, and why it has that value. Those of the Python code are in
// offload/policy/tuning.py and allocator/defaults.py. "Chosen": not measured.
//
// Lock: none; these are constants.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ballonet::tuning {

constexpr long kMicrosecond = 1'000, kMillisecond = 1'000'000;  // in ns

// Blocks of the heap.

// Bytes. Blocks below this, and below half a page, have arenas of their own, so that a small live block does not hold
// a large block's page. torch's caching allocator parts them at the same size.
constexpr std::uint64_t kSmallBlock = 1 << 20;
// Free blocks of one bin that a search looks at before it takes the best so far: bounds its time (blocks.h). Chosen.
constexpr unsigned kBlocksLookedAt = 24;
// Times that an allocation waits for retiring pages, which others may take. Chosen.
constexpr int kWaitsForPages = 3;
// Bytes. The stand-in is told of idle blocks of this size and more: smaller ones are copied faster than told. Chosen.
constexpr std::uint64_t kIdleTold = 4096;

// Pages that are mapped before they are needed (mapper.h).

// Bytes in all; eLLM §5.1 has 50 MB. The same as AHEAD of offload/policy/kv_pages.py.
constexpr std::size_t kAheadBytes = 50'000'000;
// Requests that wait for the background; more are dropped, as what is mapped late is only slower. Chosen.
constexpr std::size_t kAheadRequests = 4096;

// Streams (streams.h) and heaps (arenas.h) that are found without a lock. Chosen: more than programs have.

constexpr std::size_t kQuickStreams = 64;
constexpr std::size_t kHeapRanges = 4096;

// The background thread (background.h).

// Pieces that it unmaps under one lock: an unmap takes 14 us on an H200, so no thread waits for much more than 0.1 ms.
constexpr std::size_t kPiecesPerLock = 8;
// ns until it looks again for retirements that have passed; twice as long each time that there are none. Chosen.
constexpr long kFirstLook = 500 * kMicrosecond, kLastLook = 16 * kMillisecond;
// ns that it rests after each piece, at least and at most, as long as the piece took: others get the lock. Chosen.
constexpr long kShortestRest = 20 * kMicrosecond, kLongestRest = 1 * kMillisecond;

// Times that a call is repeated that must not fail: what it gives back would be lost for good. Chosen.

constexpr int kReleases = 8;       // of memory, by the driver
constexpr int kPutBack = 4;        // of pages, after an exchange that failed
constexpr int kFences = 4;         // where a stream began to capture in between
constexpr int kUndos = 3;          // in Python, where it raises what is an `Exception`
constexpr int kInterrupted = 100;  // in Python, where it raises what is not, as Ctrl-C does

// Records that are kept until they are read; of more the oldest are dropped. Chosen.

constexpr std::size_t kTakenKept = 1 << 12;            // entries that were taken (reclaim.h)
constexpr std::size_t kEventsKept = 1 << 13;           // events.h
constexpr std::size_t kSamplesKept = 1 << 16;          // numbers of pages over time (events.h)
constexpr std::int64_t kSampleNs = 50 * kMicrosecond;  // changes closer together are one sample, the last

}  // namespace ballonet::tuning
