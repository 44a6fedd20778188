// Cuts a batch of messages into rounds, each one NCCL group of bounded size. Large groups hang,
// since NCCL cuts them into kernels by a budget of each rank alone. Different cuts on the two ends
// hang as well, so the round of a message depends only on information that both ends have.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "message/operation.h"

namespace pipecomm {

struct DeviceMessage {
  Direction direction = Direction::send;
  int peer = 0;
  std::byte* data = nullptr;
  int64_t num_bytes = 0;
};

inline constexpr int kDefaultMaxOpsPerGroup = 64;
inline constexpr int64_t kMaxPieceBytes = int64_t{1} << 30;

// The messages of one channel to and from other ranks, in order, as rounds that run one after the
// other. Both ends omit empty messages and cut those above kMaxPieceBytes into the same pieces. All
// ranks run the rounds in the same global order, and the two ends of a message put it in the same
// round, so no rank can wait in a round for a rank that is still in an earlier one.
//
// Round of the k-th piece from rank s to rank d within the batch:
//   (k / num_pieces_per_pair, ((d - s) mod size) / num_steps)
// Both divisors follow from max_ops and size: no round has more than max_ops pieces on any rank.
std::vector<std::vector<DeviceMessage>> cut_rounds(std::span<const DeviceMessage> messages,
                                                   int rank, int size, int max_ops);

}  // namespace pipecomm
