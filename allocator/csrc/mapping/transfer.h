// Copies between host and device beside the work of other streams.
//
// Note [Order]
// A copy overwrites what earlier work may still read, and is read by later work. So it starts when everything has
// passed that the stream named at its submission was given before, and its reader has a stream of its own wait for its
// event. The host waits for neither. All copies to the device share one stream, and all others another one: the link
// carries one copy each way at a time in any case. Nothing orders copies of the two streams but `after`.
//
// Guarantees: copies of one direction happen in the order in which they were submitted.
//
// Lock: these take the mapper's, and hold none while they wait.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "mapping/mapper.h"

namespace ballonet {

// Copies; those of one direction are carried out in the order of their submission.
class Transfer : public std::enable_shared_from_this<Transfer> {
 public:
  // The end of a submission's copies.
  class Done {
   public:
    Done(std::shared_ptr<Transfer> transfer, Fence fence) : transfer_(std::move(transfer)), fence_(std::move(fence)) {}
    ~Done();
    Done(const Done&) = delete;
    Done& operator=(const Done&) = delete;

    // What `stream` is given from now on waits for the copies. On the stand-in, whose stream 0 is the calling thread,
    // the thread does.
    void before(CUstream stream);
    bool passed();
    void wait();  // the host waits

   private:
    std::shared_ptr<Transfer> transfer_;
    Fence fence_;
  };

  // Throws DriverError.
  explicit Transfer(std::shared_ptr<Mapper> mapper);
  Transfer(const Transfer&) = delete;
  Transfer& operator=(const Transfer&) = delete;

  // Submits copies that start when what `after` was given so far has passed, without it what every stream was given
  // that was ever seen. Host memory is given by its address.
  // The bytes are counted for `owner` as going to the host or to the device. Throws UsageError while `after`,
  // or any of these, is being captured, DriverError; nothing was copied, or what was is waited for.
  std::shared_ptr<Done> copy(const std::vector<Copy>& parts, std::optional<CUstream> after, Owner owner, Place to);

 private:
  const std::shared_ptr<Mapper> mapper_;
};

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
