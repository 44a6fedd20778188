// A call whose work runs on streams of a device.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "copy/device_runtime.h"
#include "message/flight_record.h"
#include "message/operation.h"

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
  const uint32_t call_site = FlightRecord::call_site;

  // Filled in before the operation is published:
  uint64_t capture =
      0;  // of a CUDA graph that it is part of: it runs at each replay, never by itself
  struct End {
    StreamHandle stream;
    EventPtr event;
  };
  std::vector<End> ends;  // all done = operation done
  // Of a captured operation, on one stream: how often it has begun and ended.
  struct Part {
    StreamHandle stream;
    DeviceRuntime::Counter *started, *ended;
  };
  std::vector<Part> parts;
  uint64_t number = 0;                  // in the order of launches
  std::vector<FlightMessage> messages;  // the first of them, for errors and the flight record
  size_t num_messages = 0;

  std::atomic<bool> done{false};  // seen by the host

  bool is_captured() const { return capture != 0; }
  void add_message(Direction direction, int peer, const Descriptor& descriptor) {
    if (++num_messages <= FlightRecord::kMaxMessagesPerOperation)
      messages.push_back({direction, MessageState::posted, false, peer, descriptor});
  }

  FlightOperation flight() const {
    FlightOperation flight;
    flight.number = number;
    flight.op = op;
    flight.on_device = true;
    flight.is_captured = is_captured();
    flight.call_site = call_site;
    flight.posted_at = posted_at;
    flight.num_messages = num_messages;
    return flight;
  }

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
