// Finds out that two ends disagree about a message that neither of them describes on the wire: NCCL
// moves bytes and nothing else. Both ends number their messages and tell each other, over the
// control plane and without waiting, what they believe of the ones that are new to them (or of
// all). Whoever hears a claim that differs from its own message of that number has found a
// mismatch.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <unordered_set>
#include <vector>

#include "engine/descriptor.h"
#include "engine/operation.h"

namespace pipecomm {

enum class Check : uint8_t {
  off,
  first_use,  // claim each distinct (peer, direction, channel, description) once
  full,       // claim every message
};

class MessageCheck {
 public:
  struct Mismatch {
    int peer;
    Direction direction;  // as seen from here
    Descriptor ours, theirs;
  };
  struct Posted {
    bool claim = false;  // tell the peer
    std::optional<Mismatch> mismatch;
  };

  MessageCheck(int size, int num_channels, Check check);

  // Takes note of the next message of (peer, direction, channel), and numbers it (`seq`).
  Posted posted(int peer, Direction direction, Descriptor& descriptor);
  // A claim of the peer about one of its messages; `direction` as seen from there.
  std::optional<Mismatch> heard(int peer, Direction direction, const Descriptor& theirs);
  // Whether posting it would claim nothing because it is not new.
  bool is_known(int peer, Direction direction, const Descriptor& descriptor) const;

 private:
  // Equal descriptions in a row, numbers [begin, end).
  struct Run {
    uint64_t begin, end;
    Descriptor descriptor;
  };
  struct Order {  // the messages of one (peer, direction, channel)
    uint64_t next_seq = 0;
    std::unordered_set<uint64_t> known;     // digests
    std::deque<Run> runs;                   // the latest ones
    std::map<uint64_t, Descriptor> claims;  // of messages that are not posted here yet
  };
  size_t order_idx(int peer, Direction direction, int channel) const {
    return (size_t(peer) * 2 + size_t(direction)) * size_t(num_channels_) + size_t(channel);
  }

  const int size_;
  const int num_channels_;
  const Check check_;
  mutable std::mutex mutex_;
  std::vector<Order> orders_;
};

}  // namespace pipecomm
