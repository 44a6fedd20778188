// Identifies messages or exchanges that run one after another on a device, on one NCCL
// communicator.
#pragma once

#include <algorithm>
#include <compare>
#include <numeric>
#include <vector>

#include "message/operation.h"
#include "transport/transport.h"

namespace pipecomm {

// The messages of a channel from ranks[0] to ranks[1], or the exchanges of a channel between `ranks`,
// which increase; empty: all ranks. The same on each of them.
struct LaneKey {
  int channel = kCollectiveChannel;
  std::vector<int> ranks = {};
  bool is_one_way = false;
  auto operator<=>(const LaneKey&) const = default;
};

inline LaneKey lane_of(int channel, Direction direction, int rank, int peer) {
  if (direction == Direction::send) return {channel, {rank, peer}, true};
  return {channel, {peer, rank}, true};
}

// Increasing: the NCCL rank is the place in this list.
inline std::vector<int> ranks_of(const LaneKey& key, int group_size) {
  std::vector<int> ranks = key.ranks;
  if (ranks.empty()) {
    ranks.resize(static_cast<size_t>(group_size));
    std::iota(ranks.begin(), ranks.end(), 0);
  }
  std::ranges::sort(ranks);
  return ranks;
}

}  // namespace pipecomm
