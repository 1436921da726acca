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

}  // namespace ballonet
