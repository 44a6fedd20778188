// Host memory for messages of tensors that have gaps or are on a device: kernels of the device pack
// those into pinned memory, and unpack them from there. Only boxes of a plan are sent, so only they
// are written.
//
// The host waits for the work on the caller's stream before it enqueues a copy. So no copy is
// queued on the one staging stream behind work that waits for another rank.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "copy/device_runtime.h"
#include "engine/point_to_point.h"
#include "engine/staging.h"
#include "engine/whole_copies.h"

namespace pipecomm {

// The memory of each message of a batch, and the copies between it and the tensor.
struct StagedBatch {
  std::shared_ptr<std::byte> memory;
  std::vector<std::byte*> data;  // of each element; null: a message to oneself, or an empty one
  WholeCopies outgoing, incoming;
};

// Stages the batch of `rank` in memory of `pool`: all tensors, or only those with gaps, while the
// others are sent in place. Messages to itself are copied with the outgoing ones.
enum class Staged : uint8_t { all, with_gaps };
StagedBatch stage_batch(std::span<const PointToPoint> batch, const OwnMessages& own, int rank,
                        Staged which, StagingPool& pool);

class HostStaging {
 public:
  explicit HostStaging(std::shared_ptr<DeviceRuntime> runtime);

  // An event after the work on the calling thread's current stream. Throws std::invalid_argument
  // while a graph is captured on it: a replay would not repeat the work of the hosts.
  EventPtr work_of_caller(const char* op);
  // Returns once `work` is done, or with what `keep_waiting` throws.
  void wait(const EventPtr& work, const std::function<void()>& keep_waiting);
  // Runs the tasks and returns once they are done; waits for no other work.
  void execute(std::span<const CopyTask> tasks, const CopyBuffers& buffers, const Scale& scale);

 private:
  const std::shared_ptr<DeviceRuntime> runtime_;
  const StreamHandle stream_;
};

}  // namespace pipecomm
