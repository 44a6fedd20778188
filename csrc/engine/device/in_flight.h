// The operations that streams still work on, and those of captures that have not ended. Threads of
// the user poll them in passing, and one thread of this class polls all, so that deadlines and the
// release of memory need no call of the user. An event query can be stuck in the CUDA driver behind
// the very work that never ends; no other thread waits for that one.
#pragma once

#include <condition_variable>
#include <deque>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "copy/device_runtime.h"
#include "engine/device/device_operation.h"
#include "engine/dispatch.h"

namespace pipecomm {

class InFlight : public std::enable_shared_from_this<InFlight> {
 public:
  InFlight(std::shared_ptr<DeviceRuntime> runtime, Dispatch& dispatch)
      : runtime_(std::move(runtime)), dispatch_(&dispatch) {}

  void start(int rank);
  // Leaves the thread behind if it is stuck in the driver. The communicator may then be destroyed.
  void stop();

  // A captured operation is kept until its capture has ended, even if the user drops the handle: work
  // of the same capture must not get its memory, which afterwards belongs to the graph.
  void add(const DeviceOperationPtr& operation);
  // Whether all its work is done; asks the device, and does not free memory of the operation. An
  // error of the device fails the communicator.
  bool has_ended(DeviceOperation& operation);
  // The same, and marks an ended operation as done.
  bool poll(DeviceOperation& operation);
  // Removes finished ones among the first operations.
  void sweep();

  std::vector<DeviceOperationPtr> all() const;
  // Whether it is past its deadline, and either was polled since or the device does not answer.
  bool is_late(const Operation& operation) const;
  // Drops operations that have not ended. If kernels may still run, the memory of their tensors is
  // never freed.
  void abandon(bool kernels_may_run);

 private:
  void look();
  void sweep_first(size_t max_asked);
  void drop_captured();
  bool is_idle() const { return operations_.empty() && captured_.empty(); }

  const std::shared_ptr<DeviceRuntime> runtime_;
  std::mutex dispatch_mutex_;
  Dispatch* dispatch_;  // null after stop()

  mutable std::mutex mutex_;
  std::deque<DeviceOperationPtr> operations_;
  std::map<uint64_t, std::vector<DeviceOperationPtr>> captured_;  // by capture
  std::condition_variable changed_;
  bool stopping_ = false;
  bool is_asleep_ = false;         // the thread: add() has to wake it
  Clock::time_point looked_at_{};  // when the thread began its latest poll of all operations
  std::thread thread_;
  std::future<void> ended_;
};

}  // namespace pipecomm
