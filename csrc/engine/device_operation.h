// A call whose work runs on streams of a device.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "copy/device_runtime.h"
#include "engine/operation.h"

namespace pipecomm {

class DeviceOperation {
 public:
  DeviceOperation(OpCode the_op, Deadline the_deadline, StreamHandle the_caller, bool async)
      : op(the_op), deadline(the_deadline), caller(the_caller), is_async(async) {}

  const OpCode op;
  const Clock::time_point posted_at = Clock::now();
  const Deadline deadline;
  const StreamHandle caller;  // the stream that was current at the call
  const bool is_async;

  // Filled in before the operation is published:
  bool is_captured = false;    // part of a CUDA graph: runs at each replay, never by itself
  std::vector<EventPtr> ends;  // all done = operation done
  struct Message {
    Direction direction;
    int peer;
    Descriptor descriptor;
  };
  std::optional<Message> shown;  // its first message, to name in errors

  std::atomic<bool> done{false};  // seen by the host

  // A tensor lives until the host has seen the end, or until release().
  void keep(std::shared_ptr<void> resource) { kept_.push_back(std::move(resource)); }
  void release() {
    std::vector<std::shared_ptr<void>> kept;
    std::lock_guard lock(mutex_);
    kept.swap(kept_);
  }

 private:
  std::mutex mutex_;
  std::vector<std::shared_ptr<void>> kept_;
};
using DeviceOperationPtr = std::shared_ptr<DeviceOperation>;

}  // namespace pipecomm
