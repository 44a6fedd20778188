// How many messages each (peer, direction, channel) has had on this rank; and, once a peer closes,
// how many it has had there. A message beyond that has no other end.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <vector>

#include "message/operation.h"
#include "transport/transport.h"

namespace pipecomm {

class MessageCounts {
 public:
  struct Unmatched {
    int peer;
    Direction direction;  // as seen from here
    int channel;
    uint64_t seq;
  };

  explicit MessageCounts(int size)
      : counts_(size_t(size) * 2 * kNumChannels), limits_(counts_.size()) {}

  // The number of the next message.
  uint64_t next(int peer, Direction direction, int channel) {
    std::lock_guard lock(mutex_);
    return counts_[idx_of(peer, direction, channel)]++;
  }
  uint64_t count(int peer, Direction direction, int channel) const {
    std::lock_guard lock(mutex_);
    return counts_[idx_of(peer, direction, channel)];
  }
  bool has_any(int peer) const {
    std::lock_guard lock(mutex_);
    const auto begin = counts_.begin() + ptrdiff_t(idx_of(peer, Direction::send, 0));
    return std::any_of(begin, begin + 2 * kNumChannels, [](uint64_t count) { return count > 0; });
  }
  // The peer posts no more than these; `direction` as seen from here.
  void limit(int peer, Direction direction, int channel, uint64_t count) {
    std::lock_guard lock(mutex_);
    if (channel >= 0 && channel < kNumChannels) limits_[idx_of(peer, direction, channel)] = count;
  }
  // The first message beyond a limit.
  std::optional<Unmatched> unmatched() const {
    std::lock_guard lock(mutex_);
    for (size_t idx = 0; idx < counts_.size(); ++idx)
      if (limits_[idx] && counts_[idx] > *limits_[idx]) return at(idx);
    return std::nullopt;
  }
  // Whether the peer will not match the next message.
  bool has_ended(int peer, Direction direction, int channel) const {
    std::lock_guard lock(mutex_);
    const size_t idx = idx_of(peer, direction, channel);
    return limits_[idx] && counts_[idx] >= *limits_[idx];
  }

 private:
  size_t idx_of(int peer, Direction direction, int channel) const {
    return (size_t(peer) * 2 + size_t(direction)) * kNumChannels + size_t(channel);
  }
  Unmatched at(size_t idx) const {
    return {int(idx / kNumChannels / 2), Direction(idx / kNumChannels % 2), int(idx % kNumChannels),
            *limits_[idx]};
  }

  mutable std::mutex mutex_;
  std::vector<uint64_t> counts_;
  std::vector<std::optional<uint64_t>> limits_;
};

}  // namespace pipecomm
