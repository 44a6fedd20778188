// Finds out that two ends disagree about a message that neither of them describes on the wire: NCCL
// moves bytes and nothing else. Both ends number their messages and tell each other, over the
// control plane and without waiting, what they believe of the ones that are new to them (or of
// all). An end that hears a claim which differs from its own message of that number has found a
// mismatch.
//
// Messages of collectives that are new to both ends are compared before they run (Agreement). What
// is claimed of them is for an end that believes to know them.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <tuple>
#include <unordered_set>

#include "message/descriptor.h"
#include "message/operation.h"
#include "transport/transport.h"

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
  // Numbers a message that is compared elsewhere: claims of the peer about it say nothing.
  void skip(int peer, Direction direction, Descriptor& descriptor);
  // The ends no longer number the messages of this channel alike.
  void stop_numbers(int channel);
  // Both ends agree about it, now and later.
  void learn(int peer, Direction direction, const Descriptor& descriptor);
  // A message of this order is now part of a graph. Its replays are not numbered, and the other end
  // may count them as messages, so numbers of this order mean nothing any more: what the peer is to
  // be told, once.
  std::optional<Descriptor> captured(int peer, Direction direction, const Descriptor& descriptor);

 private:
  // Equal descriptions in a row, numbers [begin, end). Numbers between runs were skipped.
  struct Run {
    uint64_t begin, end;
    Descriptor descriptor;
  };
  struct Order {  // the messages of one (peer, direction, channel)
    uint64_t next_seq = 0;
    bool is_numbered = true;
    std::unordered_set<uint64_t> known;  // digests of the latest descriptions
    std::deque<uint64_t> known_in_order;
    std::deque<Run> runs;                   // the latest ones
    std::map<uint64_t, Descriptor> claims;  // of messages that are not posted here yet
  };
  static bool learn(Order& order, const Descriptor& descriptor);
  static void stop_numbers(Order& order);
  using Key = std::tuple<int, Direction, int>;
  Order& order_of(int peer, Direction direction, int channel);  // with mutex_

  const int size_;
  const int num_channels_;
  const Check check_;
  mutable std::mutex mutex_;
  std::map<Key, Order> orders_;  // that have had messages, or claims
  std::set<int> unnumbered_channels_;
};

}  // namespace pipecomm
