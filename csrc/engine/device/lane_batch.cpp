#include "engine/device/lane_batch.h"

#include <algorithm>
#include <map>

namespace pipecomm {

std::vector<LaneBatch> LaneBatch::split(std::span<const PointToPoint> batch, const OwnMessages& own,
                                        int rank) {
  std::map<LaneKey, LaneBatch> lanes;
  const auto lane = [&](const LaneKey& key) -> LaneBatch& {
    return lanes.try_emplace(key, LaneBatch(key)).first->second;
  };
  for (const PointToPoint& op : batch)
    if (op.peer != rank)
      lane(lane_of(op.channel, op.direction, rank, op.peer)).messages_.push_back(&op);
  for (const auto& messages : own) {
    const LaneKey of_channel{messages.first->channel};  // sorts before all others
    const auto first = lanes.lower_bound(of_channel);
    const bool has_one = first != lanes.end() && first->first.channel == of_channel.channel;
    lane(has_one ? first->first : of_channel).own_.push_back(messages);
  }
  std::vector<LaneBatch> used;
  for (auto& [key, part] : lanes) used.push_back(std::move(part));
  return used;
}

std::vector<DeviceMessage> LaneBatch::begin(DeviceRuntime& runtime, StreamHandle stream) {
  for (const auto& [send, recv] : own_) {
    const int64_t num_bytes = send->tensor.num_bytes();
    if (num_bytes == 0) continue;
    if (recv->tensor.is_contiguous())
      runtime.copy(recv->tensor.data, send->tensor.data, num_bytes, stream);
    else
      scatters_.add(send->tensor, recv->tensor);
  }
  std::vector<DeviceMessage> messages;
  for (const PointToPoint* op : messages_) {
    const int64_t num_bytes = op->tensor.num_bytes();
    std::byte* data = op->tensor.data;
    if (num_bytes > 0 && op->direction == Direction::recv && !op->tensor.is_contiguous()) {
      data = staging_.emplace_back(runtime.allocate(num_bytes, stream)).get();
      scatters_.add(contiguous_at(data, op->tensor), op->tensor);
    }
    messages.push_back({op->direction, op->peer, data, num_bytes});
  }
  return messages;
}

}  // namespace pipecomm
