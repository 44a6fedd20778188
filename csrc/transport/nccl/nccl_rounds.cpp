#include "transport/nccl/nccl_rounds.h"

#include <algorithm>
#include <map>
#include <utility>

namespace pipecomm {

std::vector<std::vector<DeviceMessage>> cut_rounds(std::span<const DeviceMessage> messages,
                                                   int rank, int size, int max_ops) {
  // In step i a rank sends to the rank i + 1 places ahead and receives from the one i + 1 places
  // behind: two pieces.
  const int num_steps = std::clamp(max_ops / 2, 1, std::max(1, size - 1));
  const int64_t num_pieces_per_pair = std::max(1, max_ops / (2 * num_steps));
  std::vector<int64_t> num_pieces(2 * static_cast<size_t>(size));  // so far, [direction][peer]
  std::map<std::pair<int64_t, int>, std::vector<DeviceMessage>> rounds;
  for (const DeviceMessage& message : messages) {
    const bool sends = message.direction == Direction::send;
    const int distance = sends ? message.peer - rank : rank - message.peer;
    const int step = (distance + size) % size - 1;  // from 0; a rank never sends to itself
    int64_t& piece_idx = num_pieces[(sends ? 0 : size) + message.peer];
    for (int64_t begin = 0; begin < message.num_bytes; begin += kMaxPieceBytes) {
      DeviceMessage piece = message;
      piece.data += begin;
      piece.num_bytes = std::min(kMaxPieceBytes, message.num_bytes - begin);
      rounds[{piece_idx++ / num_pieces_per_pair, step / num_steps}].push_back(piece);
    }
  }
  std::vector<std::vector<DeviceMessage>> cut;
  cut.reserve(rounds.size());
  for (auto& [key, pieces] : rounds) cut.push_back(std::move(pieces));
  return cut;
}

}  // namespace pipecomm
