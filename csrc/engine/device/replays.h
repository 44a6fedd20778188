// The deadlines of captured operations. The host does not observe replays, so each part of a
// captured operation, which runs on one stream, counts when it begins and when it ends, in memory of
// the host. Reading these counters now and then needs no call of the driver.
#pragma once

#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "copy/device_runtime.h"
#include "engine/device/device_operation.h"

namespace pipecomm {

class Replays {
 public:
  struct Late {
    OpCode op;
    std::optional<FlightMessage> first_message;
    Clock::duration running_for;
  };

  // Without a timeout nothing is counted.
  Replays(std::shared_ptr<DeviceRuntime> runtime, std::optional<std::chrono::nanoseconds> timeout)
      : runtime_(std::move(runtime)), timeout_(timeout) {}

  // Enqueue the counting, around the part of a captured operation on a stream.
  void begin_part(DeviceOperation& operation, StreamHandle stream);
  void end_part(const DeviceOperation& operation, StreamHandle stream);
  // Called when all parts have been captured; watches them from now on.
  void add(const DeviceOperation& operation);

  // The first one running for longer than the timeout, or none. Checks a few times per timeout.
  std::optional<Late> late();

 private:
  struct Watched {
    Watched(const DeviceOperation::Part& the_part, OpCode the_op) : part(the_part), op(the_op) {}
    DeviceOperation::Part part;
    OpCode op;
    std::optional<FlightMessage> first_message;
    uint32_t started = 0, ended = 0;         // as last seen
    Clock::time_point since = Clock::now();  // when they last changed
  };

  const std::shared_ptr<DeviceRuntime> runtime_;
  const std::optional<std::chrono::nanoseconds> timeout_;
  std::mutex mutex_;
  std::vector<Watched> watched_;
  Clock::time_point next_look_{};
};

}  // namespace pipecomm
