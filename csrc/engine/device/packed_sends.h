// Packs the sends of a batch that have gaps, since NCCL sends only contiguous memory.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "copy/device_runtime.h"
#include "engine/point_to_point.h"

namespace pipecomm {

class PackedSends {
 public:
  explicit PackedSends(std::span<const PointToPoint> batch);

  // The batch, with sends that are contiguous once pack() has been called.
  std::span<const PointToPoint> batch() const { return packed_.empty() ? given_ : packed_; }
  // Enqueues one launch for all sends with gaps. Returns their memory, which must live until the
  // messages have been sent; null if there are none.
  std::shared_ptr<std::byte> pack(DeviceRuntime& runtime, StreamHandle stream);

 private:
  const std::span<const PointToPoint> given_;
  std::vector<PointToPoint> packed_;  // empty if no send has gaps
};

}  // namespace pipecomm
