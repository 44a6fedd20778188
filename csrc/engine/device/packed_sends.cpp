#include "engine/device/packed_sends.h"

#include <algorithm>

#include "engine/whole_copies.h"
#include "plan/checked.h"
#include "plan/lower.h"

namespace pipecomm {
namespace {

bool is_packed(const PointToPoint& op) {
  return op.direction == Direction::send && !op.tensor.is_contiguous() && op.tensor.num_bytes() > 0;
}

}  // namespace

PackedSends::PackedSends(std::span<const PointToPoint> batch) : given_(batch) {
  if (std::ranges::any_of(batch, is_packed)) packed_.assign(batch.begin(), batch.end());
}

std::shared_ptr<std::byte> PackedSends::pack(DeviceRuntime& runtime, StreamHandle stream) {
  if (packed_.empty()) return nullptr;
  std::vector<int64_t> offsets;
  int64_t end = 0;
  for (const PointToPoint& op : given_) {
    offsets.push_back(checked_align_up(end, kStagingAlignBytes));
    if (is_packed(op)) end = checked_add(offsets.back(), op.tensor.num_bytes());
  }
  const std::shared_ptr<std::byte> memory = runtime.allocate(end, stream);
  WholeCopies gathers;
  for (size_t idx = 0; idx < given_.size(); ++idx) {
    if (!is_packed(given_[idx])) continue;
    const TensorRef& tensor = given_[idx].tensor;
    packed_[idx].tensor = contiguous_at(memory.get() + offsets[idx], tensor);
    gathers.add(tensor, packed_[idx].tensor);
  }
  runtime.execute(gathers.tasks(), gathers.buffers(), Scale{}, stream);
  return memory;
}

}  // namespace pipecomm
