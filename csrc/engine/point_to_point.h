// A batch of point-to-point messages, and its validation. Shared by host and device communicators.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "message/operation.h"
#include "plan/exchange_plan.h"
#include "plan/inline_vector.h"

namespace pipecomm {

// Shape or strides of a tensor of one call. Few tensors have more than six dims.
using TensorDims = InlineVector<int64_t, 6>;

// A tensor in memory that `storage` keeps alive.
struct TensorRef {
  std::byte* data = nullptr;
  DType dtype;
  TensorDims shape;
  TensorDims strides;  // in elements
  std::shared_ptr<void> storage;

  int64_t num_bytes() const;
  bool is_contiguous() const;
};

// One element of a batch.
struct PointToPoint {
  Direction direction = Direction::send;
  int peer = 0;
  int channel = 0;
  TensorRef tensor;
  uint64_t signature = 0;  // both ends must agree on it, as on shape and dtype
};

// The description of a message of `num_bytes` that is, or belongs to, `tensor`.
Descriptor describe(OpCode op, int channel, const TensorRef& tensor, uint64_t signature,
                    int64_t num_bytes);

// Throws std::invalid_argument unless 0 <= peer < size; `what` names the argument.
void check_peer(int peer, int size, const std::string& what);

// Throws std::invalid_argument unless peers and channels are in range and no receive shares memory
// with another tensor of the batch.
void check_batch(std::span<const PointToPoint> batch, int size, int num_channels);

// Messages of `rank` to itself: the k-th send of a channel meets the k-th receive of that channel,
// within the batch. Throws std::invalid_argument if they do not pair up or differ in shape or
// dtype.
using OwnMessages = std::vector<std::pair<const PointToPoint*, const PointToPoint*>>;
OwnMessages pair_own_messages(std::span<const PointToPoint> batch, int rank);

}  // namespace pipecomm
