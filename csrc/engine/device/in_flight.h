// The operations that streams still work on, and who finds out that they have ended: threads of the
// user that ask anyway, and a thread of its own, so that deadlines and memory need no call of the
// user. A question about an event can be stuck in the CUDA driver behind the very work that never
// ends; nothing else waits for that thread.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <future>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "copy/device_runtime.h"
#include "engine/communicator.h"
#include "engine/device/device_operation.h"

namespace pipecomm {

class InFlight : public std::enable_shared_from_this<InFlight> {
 public:
  InFlight(std::shared_ptr<DeviceRuntime> runtime, std::shared_ptr<Communicator> control,
           std::function<void()> on_failure)
      : runtime_(std::move(runtime)), control_(std::move(control)), record_(on_failure) {}

  void start();
  // Leaves the thread behind if it is stuck in the driver.
  void stop();

  void add(const DeviceOperationPtr& operation);
  // Without an end that the host could see: it has none, or the operation is part of a graph.
  void add_ended(const DeviceOperation& operation) { write_down(operation, nullptr); }

  // Asks the device, unless the end has been seen. A device that reports an error fails the
  // communicator.
  bool poll(DeviceOperation& operation);
  // Gives back what finished ones of the first operations kept alive.
  void sweep();

  std::vector<DeviceOperationPtr> all() const;
  // Of which the device has been asked after their deadline, or does not answer.
  std::vector<DeviceOperationPtr> late() const;
  // Those that have no end after the failure of the communicator. If kernels may still run, the
  // memory of their tensors stays for good.
  void abandon(const FailurePtr& failure, bool kernels_may_run);
  std::vector<Flight> flights() const;

 private:
  void look();
  void sweep_first(size_t max_asked);
  void write_down(const DeviceOperation& operation, FailurePtr failure);

  const std::shared_ptr<DeviceRuntime> runtime_;
  const std::shared_ptr<Communicator> control_;
  FlightRecord record_;

  mutable std::mutex mutex_;
  std::deque<DeviceOperationPtr> operations_;
  std::condition_variable changed_;
  bool stopping_ = false;
  bool is_asleep_ = false;         // the thread: add() has to wake it
  Clock::time_point looked_at_{};  // when the thread began to ask about all there were
  std::thread thread_;
  std::future<void> ended_;
};

}  // namespace pipecomm
