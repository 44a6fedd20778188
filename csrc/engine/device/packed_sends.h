// The sends of a batch, of which NCCL takes only what lies in memory without gaps.
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
  // Enqueues one launch for all sends with gaps. What it returns, if there are any, has to live until
  // the messages have been sent.
  std::shared_ptr<std::byte> pack(DeviceRuntime& runtime, StreamHandle stream);

 private:
  const std::span<const PointToPoint> given_;
  std::vector<PointToPoint> packed_;  // empty if no send has gaps
};

}  // namespace pipecomm
