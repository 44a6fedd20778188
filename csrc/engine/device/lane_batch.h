// The lanes of a communicator, and the part of a batch that runs on one of them.
//
// A lane is an NCCL communicator with a stream, on which every rank runs its messages in post order.
// Each channel has two: one for messages to higher ranks, one for messages to lower ones. So two
// ranks that first receive and then send, or a ring of them, do not wait for each other. The
// collectives have a lane of both directions.
#pragma once

#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "copy/device_runtime.h"
#include "engine/point_to_point.h"
#include "engine/whole_copies.h"
#include "transport/nccl/nccl_transport.h"

namespace pipecomm {

inline int num_lanes(int num_channels) { return 2 * num_channels + 1; }
inline int collective_lane(int num_channels) { return 2 * num_channels; }
inline int lane_of(int channel, Direction direction, int rank, int peer) {
  const bool goes_up = (direction == Direction::send) == (peer > rank);
  return 2 * channel + (goes_up ? 0 : 1);
}
inline Reach reach_of(int lane_idx, int num_channels) {
  if (lane_idx == collective_lane(num_channels)) return Reach::all;
  return lane_idx % 2 == 0 ? Reach::up : Reach::down;
}

class LaneBatch {
 public:
  using OwnMessages = std::vector<std::pair<const PointToPoint*, const PointToPoint*>>;

  // The lanes that a batch uses; messages to oneself run on the channel's first.
  static std::vector<LaneBatch> split(std::span<const PointToPoint> batch, const OwnMessages& own,
                                      int rank);

  int lane_idx() const { return lane_idx_; }
  // Enqueues what comes before the messages. What arrives for tensors with gaps goes through memory
  // without.
  LaneMessages begin(DeviceRuntime& runtime, StreamHandle stream);
  // And from there to all of them in one launch.
  void end(DeviceRuntime& runtime, StreamHandle stream) {
    if (!scatters_.empty())
      runtime.execute(scatters_.tasks(), scatters_.buffers(), Scale{}, stream);
    staging_.clear();
  }

 private:
  explicit LaneBatch(int lane_idx) : lane_idx_(lane_idx) {}

  int lane_idx_;
  std::vector<const PointToPoint*> messages_;
  OwnMessages own_;
  WholeCopies scatters_;
  std::vector<std::shared_ptr<std::byte>> staging_;
};

}  // namespace pipecomm
