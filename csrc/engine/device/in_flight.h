// The operations that streams still work on, and who finds out that they have ended: threads of the
// user that ask anyway, and a thread of its own, so that deadlines and memory need no call of the
// user. A question about an event can be stuck in the CUDA driver behind the very work that never
// ends; nothing else waits for that thread.
#pragma once

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
  InFlight(std::shared_ptr<DeviceRuntime> runtime, Communicator& communicator)
      : runtime_(std::move(runtime)), communicator_(&communicator) {}

  void start(int rank);
  // Leaves the thread behind if it is stuck in the driver. The communicator may go after that.
  void stop();

  void add(const DeviceOperationPtr& operation);
  // Whether all its work is done; asks the device, without memory of the operation going back. A
  // device that reports an error fails the communicator.
  bool has_ended(DeviceOperation& operation);
  // The same, and the operation is done if it has.
  bool poll(DeviceOperation& operation);
  // Forgets finished ones among the first operations.
  void sweep();

  std::vector<DeviceOperationPtr> all() const;
  // Whether the device has been asked after the deadline, or does not answer.
  bool is_late(const Operation& operation) const;
  // Those that have no end after the failure of the communicator. If kernels may still run, the
  // memory of their tensors stays for good.
  void abandon(bool kernels_may_run);

 private:
  void look();
  void sweep_first(size_t max_asked);

  const std::shared_ptr<DeviceRuntime> runtime_;
  std::mutex communicator_mutex_;
  Communicator* communicator_;  // null: nobody is to be told any more

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
