// The messages of a collective as one rank sees them. There is one in each direction between any
// two ranks that take part, even if it is empty, so that each rank gets a report from every other.
#pragma once

#include <span>
#include <vector>

#include "engine/point_to_point.h"
#include "plan/lower.h"

namespace pipecomm {

struct PeerMessages {
  int peer = 0;
  Descriptor send, recv;
  const LoweredMessage* lowered_send = nullptr;  // of an exchange; null: nothing to send
  const LoweredMessage* lowered_recv = nullptr;

  bool sends() const { return send.num_bytes > 0; }
  bool receives() const { return recv.num_bytes > 0; }
};

// The messages of one direction, by increasing peer.
class MessagesByPeer {
 public:
  explicit MessagesByPeer(const std::vector<LoweredMessage>& messages)
      : next_(messages.begin()), end_(messages.end()) {}

  // Null if there is none. Call it with increasing peers.
  const LoweredMessage* with(int peer) {
    while (next_ != end_ && next_->peer < peer) ++next_;
    return next_ != end_ && next_->peer == peer ? &*next_++ : nullptr;
  }

 private:
  std::vector<LoweredMessage>::const_iterator next_, end_;
};

// Describes a message of an exchange; null: a message without data, which is described as `empty`.
inline Descriptor described(const Descriptor& empty, const LoweredMessage* message) {
  Descriptor descriptor = empty;
  if (message) {
    descriptor.signature ^= message->dtypes;
    descriptor.num_bytes = message->bytes;
  }
  return descriptor;
}

// A message without data of an exchange, as all ranks describe it. Errors name the tensor that the
// plan wants shown, or the first one. All ranks must have the same `gradient_of`, see Scope.
Descriptor empty_message(OpCode op, int channel, const ExchangePlan& plan, uint64_t gradient_of);

// The ranks that it has data for or from, increasing.
std::vector<int> peers_of(const LoweredExchange& lowered);

// Throws std::invalid_argument if the exchange has a message for a rank that is not among `peers`,
// which are increasing.
void check_peers(const LoweredExchange& lowered, std::span<const int> peers);

// The messages with each of `peers`, which are increasing.
std::vector<PeerMessages> exchange_messages(OpCode op, int channel, const ExchangePlan& plan,
                                            const LoweredExchange& lowered,
                                            std::span<const int> peers);

// The messages of an operation that all ranks describe alike, in both directions.
inline auto same_messages(const Descriptor& descriptor) {
  return [descriptor](std::span<const int> peers) {
    std::vector<PeerMessages> messages;
    for (const int peer : peers) messages.push_back({peer, descriptor, descriptor});
    return messages;
  };
}

// The message with the payload.
Descriptor broadcast_message(const TensorRef& tensor, int source);
std::vector<PeerMessages> broadcast_messages(const TensorRef& tensor, int rank, int source,
                                             std::span<const int> peers);

}  // namespace pipecomm
