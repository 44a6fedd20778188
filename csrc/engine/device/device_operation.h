// A call whose work runs on streams of a device. It has no requests, and is held until the host has
// observed the end of that work.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "copy/device_runtime.h"
#include "message/flight_record.h"
#include "message/operation.h"

namespace pipecomm {

class DeviceOperation final : public Operation {
 public:
  DeviceOperation(OpCode op, Deadline deadline, StreamHandle the_caller, bool async)
      : Operation(op, deadline), caller(the_caller), is_async(async) {
    hold();
  }

  const StreamHandle caller;  // the stream that was current at the call
  const bool is_async;

  // Filled in before the operation is in flight:
  uint64_t capture =
      0;  // the CUDA graph capture that it is part of: it runs only when the graph is replayed
  struct End {
    StreamHandle stream;
    EventPtr event;
  };
  std::vector<End> ends;  // all done = operation done
  // A captured operation on one stream: how often it has begun and ended there.
  struct Part {
    StreamHandle stream;
    DeviceRuntime::Counter *started, *ended;
  };
  std::vector<Part> parts;
  std::vector<FlightMessage> messages;  // the first of them, for errors and the flight record
  size_t num_messages = 0;
  int num_blocks = 0;  // of its kernels

  void add_message(Direction direction, int peer, const Descriptor& descriptor) {
    if (++num_messages <= FlightRecord::kMaxMessagesPerOperation)
      messages.push_back({direction, MessageState::posted, false, peer, descriptor});
  }

  // The host has observed the end. An operation that fails with its communicator does not need it.
  void end() {
    if (!has_ended_.exchange(true)) release();
  }
  bool has_ended() const { return has_ended_; }
  // For a captured operation, whose end the host cannot observe.
  void write_down_captured() {
    std::lock_guard lock(mutex_);
    write_down();
  }

  bool is_on_device() const override { return true; }
  bool is_captured() const override { return capture != 0; }
  bool waits_to_start() const override { return false; }

 protected:
  FlightOperation flight_operation() const override {
    FlightOperation flight = Operation::flight_operation();
    flight.on_device = true;
    flight.is_captured = is_captured();
    flight.num_messages = num_messages;
    return flight;
  }
  // The recorded end is the time when the host observed it; the device ended earlier.
  FlightMessage flight_message(size_t idx) const override {
    FlightMessage message = messages[idx];
    if (has_ended_ || is_captured()) message.state = MessageState::done;
    return message;
  }
  std::vector<FlightMessage> pending_messages() const override { return messages; }

 private:
  std::atomic<bool> has_ended_{false};
};
using DeviceOperationPtr = std::shared_ptr<DeviceOperation>;

}  // namespace pipecomm
