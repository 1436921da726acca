// Which addresses may be used, and what bytes are behind them.
//
// Words
//   store    where bytes are: the memfd of the device, of the host, of the peer, or plain memory of the process
//   run      bytes that are contiguous in one store
//   visible  address that may be used: mapped, and given access
//
// Neighbours that go on in address, store and offset are one run, so that a large range is found in one step.
//
// Lock: the stand-in's (state.h), held by the caller.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

namespace ballonet::standin {

enum class Store { kDevice, kHost, kPeer, kPlain };
constexpr int kStores = 3;  // that have a memfd

constexpr bool on_device(Store store) { return store == Store::kDevice || store == Store::kPeer; }

struct Run {
  Store store;
  std::uint64_t offset;  // in the memfd; for plain memory the address
  std::uint64_t size;
};

bool overlap(const std::vector<Run>& left, const std::vector<Run>& right);

class Visible {
 public:
  void show(std::uint64_t address, const Run& run);  // must be hidden
  void hide(std::uint64_t address, std::uint64_t size);
  // Appends the runs behind [address, address + size), in order; returns the first address that is not visible, or the
  // end.
  std::uint64_t find(std::uint64_t address, std::uint64_t size, std::vector<Run>* found) const;
  const std::map<std::uint64_t, Run>& runs() const { return runs_; }  // by address
  std::uint64_t bytes() const { return bytes_; }

 private:
  std::map<std::uint64_t, Run> runs_;
  std::uint64_t bytes_ = 0;
};

}  // namespace ballonet::standin
