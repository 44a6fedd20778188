// Detects that ranks disagree about messages, since NCCL moves bytes without a description. The two
// ends of a message give it the same number and announce their descriptions of new messages (or of
// all) to each other over the control plane. An end that receives a claim which differs from its
// own message of that number has found a mismatch.
//
// Point-to-point messages are numbered by (peer, direction, channel). A collective has a message in
// each direction between any two of its members, most of them empty, and is numbered by (peer,
// channel). A rank compares it with its neighbours in the tree of the members, and with every peer
// that it has exchanged data with on this channel. The tree connects all members, so if calls
// differ, they differ between two neighbours. A message that only one end expects is compared as
// well: that end announces it or, if the two have exchanged it before, the other end announces that
// there is none.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <unordered_set>
#include <utility>
#include <vector>

#include "engine/peer_messages.h"
#include "message/operation.h"

namespace pipecomm {

enum class Check : uint8_t {
  off,
  first_use,  // announce each distinct (peer, direction, channel, description) once
  full,       // announce every message
};

class MessageCheck {
 public:
  struct Announcement {
    int peer;
    Direction direction;  // as seen from here
    Descriptor descriptor;
  };
  struct Mismatch {
    int peer;
    Direction direction;  // as seen from here
    Descriptor ours, theirs;
    std::string refusal;  // why the peer takes no part; "": it does
    bool is_under_way;    // this rank may have enqueued its part of the message
  };
  struct Posted {
    std::vector<Announcement> announcements;
    std::optional<Mismatch> mismatch;
    bool is_compared = true;  // false: some of it is no longer numbered
  };
  // A collective as one rank sees it.
  struct Collective {
    int channel;
    std::vector<int> peers;     // the other members, increasing
    std::vector<int> compared;  // the members with which it is always compared
    std::function<std::vector<PeerMessages>(std::span<const int> peers)> messages_with;
  };

  MessageCheck(int size, int num_channels, Check check)
      : size_(size), num_channels_(num_channels), check_(check) {}

  // Number the next message, or those of the next collective. The caller sends the announcements, and
  // enqueues nothing if there is a mismatch, nor, if `is_awaited`, before missing() finds none.
  void post(int peer, Direction direction, Descriptor descriptor, bool is_awaited, Posted& posted);
  // `is_refused`: this rank takes no part in the collective. The announcements carry the reason.
  Posted post(const Collective& collective, bool is_awaited, bool is_refused = false);

  // A claim of the peer about one of its messages; `direction` as seen from there. `refusal` is why it
  // takes no part, or "".
  std::optional<Mismatch> receive(int peer, Direction direction, const Descriptor& theirs,
                                  const std::string& refusal = "");
  // With Check::full: a peer whose claim about one of these messages has not come before `until`,
  // or has shown a mismatch.
  std::optional<int> missing(std::span<const Announcement> announcements, Deadline until) const;

  // Whether posting it would announce nothing because it is not new.
  bool is_known(int peer, Direction direction, const Descriptor& descriptor) const;
  bool is_known(const Collective& collective) const;
  // For messages that are now part of a graph. Its replays are not numbered, and the other ends may
  // count them as messages, so the numbers of these orders are meaningless from now on. Returns the
  // announcements of that, once per order.
  void capture(int peer, Direction direction, const Descriptor& descriptor, Posted& posted);
  Posted capture(const Collective& collective);

 private:
  struct Claim {
    Descriptor descriptor;
    std::string refusal;
  };
  // Equal messages in a row, numbers [begin, end).
  struct Run {
    uint64_t begin, end;
    Descriptor descriptor;
    bool is_awaited, is_refused;
  };
  struct Order {
    uint64_t next_seq = 0;
    bool is_numbered = true;
    std::unordered_set<uint64_t> known;  // digests of the latest descriptions
    std::deque<uint64_t> known_in_order;
    std::deque<Run> runs;              // the latest ones
    std::map<uint64_t, Claim> claims;  // of messages that are not posted here yet
    uint64_t num_received = 0;         // with Check::full: claims, which come in order
  };
  // The collectives of a channel.
  struct Collectives {
    std::vector<uint64_t> num_with;  // each peer; kNotNumbered if one was captured
    std::deque<std::pair<std::vector<int>, Run>> latest;  // peers, and the empty message
  };
  using Key = std::tuple<int, bool, int, Direction>;  // channel, of collectives, peer
  using Messages = std::vector<std::pair<Key, Descriptor>>;

  // All with mutex_:
  static bool learn(Order& order, const Descriptor& descriptor);
  Order& order_of(const Key& key);
  Collectives& collectives_on(int channel);
  Messages compared_messages(const Collective& collective) const;
  void post(const Key& key, Run message, Posted& posted);
  void capture(const Key& key, const Descriptor& descriptor, Posted& posted);
  void stop_numbers(Order& order);
  bool is_known(const Key& key, const Descriptor& descriptor) const;
  const Run* find(const Key& key, const Order& order, uint64_t seq, bool is_first);
  static std::optional<Mismatch> compare(const Key& key, const Run& ours, uint64_t seq,
                                         const Claim& theirs);

  const int size_;
  const int num_channels_;
  const Check check_;
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  std::map<Key, Order> orders_;  // that have had messages, or claims
  std::map<int, Collectives> collectives_;
};

}  // namespace pipecomm
