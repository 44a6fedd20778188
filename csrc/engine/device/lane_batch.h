// The part of a batch that runs on one lane, in the order of the batch.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "copy/device_runtime.h"
#include "engine/device/links.h"
#include "engine/point_to_point.h"
#include "engine/whole_copies.h"
#include "transport/nccl/nccl_transport.h"

namespace pipecomm {

class LaneBatch {
 public:
  // One part per lane of the batch; messages to oneself run on the first lane of the channel.
  static std::vector<LaneBatch> split(std::span<const PointToPoint> batch, const OwnMessages& own,
                                      int rank);

  const LaneKey& key() const { return key_; }
  // Enqueues the work before the messages, and returns these. Tensors with gaps receive into
  // contiguous memory.
  std::vector<DeviceMessage> begin(DeviceRuntime& runtime, StreamHandle stream);
  // Copies from there to all those tensors in one launch.
  void end(DeviceRuntime& runtime, StreamHandle stream) {
    if (!scatters_.empty())
      runtime.execute(scatters_.tasks(), scatters_.buffers(), Scale{}, stream);
    staging_.clear();
  }

 private:
  explicit LaneBatch(const LaneKey& key) : key_(key) {}

  LaneKey key_;
  std::vector<const PointToPoint*> messages_;
  OwnMessages own_;
  WholeCopies scatters_;
  std::vector<std::shared_ptr<std::byte>> staging_;
};

}  // namespace pipecomm
