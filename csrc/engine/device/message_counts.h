// Counts the messages of each (peer, direction, channel) on this rank; and, once a peer closes,
// keeps its counts as limits. A message beyond a limit has no other end.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>

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

  // The number of the next message.
  uint64_t next(int peer, Direction direction, int channel) {
    std::lock_guard lock(mutex_);
    return peers_[peer].counts[idx_of(direction, channel)]++;
  }
  uint64_t count(int peer, Direction direction, int channel) const {
    std::lock_guard lock(mutex_);
    return with(peer).counts[idx_of(direction, channel)];
  }
  bool has_any(int peer) const {
    std::lock_guard lock(mutex_);
    return std::ranges::any_of(with(peer).counts, std::identity());
  }
  // The peer posts no more than `count`; `direction` as seen from here.
  void limit(int peer, Direction direction, int channel, uint64_t count) {
    std::lock_guard lock(mutex_);
    if (channel >= 0 && channel < kNumChannels)
      peers_[peer].limits[idx_of(direction, channel)] = count;
  }
  bool has_limit(int peer) const {
    std::lock_guard lock(mutex_);
    return std::ranges::any_of(with(peer).limits, [](const auto& limit) { return !!limit; });
  }
  // The first message beyond a limit.
  std::optional<Unmatched> unmatched() const {
    std::lock_guard lock(mutex_);
    for (const auto& [peer, messages] : peers_)
      for (size_t idx = 0; idx < kNumOrders; ++idx)
        if (const auto& limit = messages.limits[idx]; limit && messages.counts[idx] > *limit)
          return Unmatched{peer, Direction(idx / kNumChannels), int(idx % kNumChannels), *limit};
    return std::nullopt;
  }
  // Whether the peer will not match the next message.
  bool has_ended(int peer, Direction direction, int channel) const {
    std::lock_guard lock(mutex_);
    const size_t idx = idx_of(direction, channel);
    const auto& [counts, limits] = with(peer);
    return limits[idx] && counts[idx] >= *limits[idx];
  }

 private:
  static constexpr size_t kNumOrders = 2 * size_t{kNumChannels};
  struct Messages {
    std::array<uint64_t, kNumOrders> counts{};
    std::array<std::optional<uint64_t>, kNumOrders> limits{};
  };
  const Messages& with(int peer) const {
    static const Messages none;
    const auto found = peers_.find(peer);
    return found == peers_.end() ? none : found->second;
  }
  static size_t idx_of(Direction direction, int channel) {
    return size_t(direction) * kNumChannels + size_t(channel);
  }

  mutable std::mutex mutex_;
  std::map<int, Messages> peers_;  // that have had messages, or have closed
};

}  // namespace pipecomm
