// Memory of the process that the device reads by itself: that of a mapped weights file.
//
// Note [Read-only]
// The memory is registered for reading alone, which is the only way for a mapping that the process itself may only
// read. Such a mapping has to be shared: of a private one Linux would copy every page that it pins for long into memory
// of the process.
//
// Guarantees: it stays registered until all copies from it have ended.
//
// Lock: these take the mapper's. An object is used by one thread at a time.
#pragma once

#include <memory>

#include "mapping/mapper.h"

namespace ballonet {

class HostMemory {
 public:
  // Throws DriverError: registered already, not to be read, more than may be pinned, or not supported.
  HostMemory(std::shared_ptr<Mapper> mapper, const void* address, std::size_t size);
  ~HostMemory();
  HostMemory(const HostMemory&) = delete;
  HostMemory& operator=(const HostMemory&) = delete;

  // Waits for the copies that were submitted and unregisters. Throws DriverError; it may be tried again.
  void close();
  // Closes without throwing. False where the driver refuses: the memory must not be freed then.
  bool let_go() noexcept;
  bool closed() const { return closed_; }
  const void* address() const { return address_; }
  std::size_t size() const { return size_; }

 private:
  const std::shared_ptr<Mapper> mapper_;
  const void* const address_;
  const std::size_t size_;
  bool closed_ = false;
};

}  // namespace ballonet
