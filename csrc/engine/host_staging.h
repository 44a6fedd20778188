// Memory of the host in which the messages of a batch travel whose tensors have gaps, or lie on a
// device: kernels of the device pack those into pinned memory, and unpack them from there. Only
// boxes of a plan travel, so only they are written.
//
// The host waits for what the caller's stream holds before a copy is enqueued. So no copy stands in
// the queue of the one stream behind work that waits for another rank.
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

// Where each tensor of a batch travels, and the copies between it and the tensor.
struct StagedBatch {
  std::shared_ptr<std::byte> memory;
  std::vector<std::byte*> data;  // of each element; null: a message to oneself, or an empty one
  WholeCopies outgoing, incoming;
};

// Of rank `rank`, with memory of `pool` for all tensors, or for those with gaps, while the others
// travel as they lie. Messages to itself are copied with the outgoing ones.
enum class Staged : uint8_t { all, with_gaps };
StagedBatch stage_batch(std::span<const PointToPoint> batch, const OwnMessages& own, int rank,
                        Staged which, StagingPool& pool);

class HostStaging {
 public:
  explicit HostStaging(std::shared_ptr<DeviceRuntime> runtime);

  // What the calling thread's current stream holds. Throws std::invalid_argument while a graph is
  // captured on it: no replay would repeat what hosts do.
  EventPtr work_of_caller(const char* op);
  // Returns once `work` is done, or with what `keep_waiting` throws.
  void wait(const EventPtr& work, const std::function<void()>& keep_waiting);
  // Runs the tasks and returns once they are done, which takes no longer than the copies.
  void execute(std::span<const CopyTask> tasks, const CopyBuffers& buffers, const Scale& scale);

 private:
  const std::shared_ptr<DeviceRuntime> runtime_;
  const StreamHandle stream_;
};

}  // namespace pipecomm
