#include "engine/device/lane_batch.h"

#include <algorithm>
#include <map>

namespace pipecomm {

std::vector<LaneBatch> LaneBatch::split(std::span<const PointToPoint> batch, const OwnMessages& own,
                                        int rank) {
  std::map<int, LaneBatch> lanes;
  const auto lane = [&](int lane_idx) -> LaneBatch& {
    return lanes.try_emplace(lane_idx, LaneBatch(lane_idx)).first->second;
  };
  for (const PointToPoint& op : batch)
    if (op.peer != rank)
      lane(lane_of(op.channel, op.direction, rank, op.peer)).messages_.push_back(&op);
  for (const auto& messages : own) {
    const int first_idx = 2 * messages.first->channel;
    lane(lanes.contains(first_idx) || !lanes.contains(first_idx + 1) ? first_idx : first_idx + 1)
        .own_.push_back(messages);
  }
  std::vector<LaneBatch> used;
  for (auto& [lane_idx, part] : lanes) used.push_back(std::move(part));
  return used;
}

LaneMessages LaneBatch::begin(DeviceRuntime& runtime, StreamHandle stream) {
  for (const auto& [send, recv] : own_) {
    const int64_t num_bytes = send->tensor.num_bytes();
    if (num_bytes == 0) continue;
    if (recv->tensor.is_contiguous())
      runtime.copy(recv->tensor.data, send->tensor.data, num_bytes, stream);
    else
      scatters_.add(send->tensor.data, recv->tensor);
  }
  LaneMessages lane{lane_idx_, stream, {}};
  for (const PointToPoint* op : messages_) {
    const int64_t num_bytes = op->tensor.num_bytes();
    std::byte* data = op->tensor.data;
    if (num_bytes > 0 && op->direction == Direction::recv && !op->tensor.is_contiguous()) {
      data = staging_.emplace_back(runtime.allocate(num_bytes, stream)).get();
      scatters_.add(data, op->tensor);
    }
    lane.messages.push_back({op->direction, op->peer, data, num_bytes});
  }
  return lane;
}

}  // namespace pipecomm
