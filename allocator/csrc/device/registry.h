// The registry of devices by torch's ordinals, and by address. Read without a lock on every allocation and every free;
// a bound device lives until the process ends, because its blocks may.
//
// Guarantees: a device that was bound is never destroyed; in the child of a fork none of its addresses is found, but by
// `owns`.
//
// Lock: binding takes one of its own; reading takes none.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "device/device.h"
#include "torch/entry.h"

namespace ballonet {

constexpr int kMaxDevices = 64;

// Puts `device` behind torch's entry points for its ordinal. Throws UsageError where another one is.
void bind(const std::shared_ptr<Device>& device);
// Takes a device from behind them. Its blocks stay valid and are freed properly.
void unbind(const std::shared_ptr<Device>& device);

// nullptr where none is bound, and in the child of a fork.
Device* bound_device(int ordinal);
// nullptr where the address is none of ours, and in the child of a fork.
Heap* heap_of(const void* pointer);
// Notes that a stream uses the address, on the device that has a range there, if any.
void note_range_stream(const void* pointer, CUstream stream);
// By address alone: true in the child of a fork too.
bool owns(const void* pointer);
// False in the child of a fork, and while no device is bound.
bool serving();

const BallonetCore* core_table();
// Name and address of each function that a pluggable allocator of torch's may call.
std::vector<std::pair<const char*, std::uintptr_t>> plain_entry_points();

}  // namespace ballonet
