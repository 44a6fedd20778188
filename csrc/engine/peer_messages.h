// The messages of a collective as one rank sees them. There is one in each direction between any
// two ranks that take part, an empty one if they have nothing to say: that is how ranks hear of
// each other.
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
};

// With each of `peers`, which are increasing. Throws std::invalid_argument if the exchange has a
// message for another rank. Errors name the tensor that the plan wants shown, or the first one.
// Both ends must have the same `gradient_of`, see Scope.
std::vector<PeerMessages> exchange_messages(OpCode op, int channel, const ExchangePlan& plan,
                                            const LoweredExchange& lowered,
                                            std::span<const int> peers, uint64_t gradient_of = 0);

std::vector<PeerMessages> broadcast_messages(const TensorRef& tensor, int rank, int source,
                                             std::span<const int> peers);

}  // namespace pipecomm
