#include "engine/peer_messages.h"

#include <stdexcept>
#include <string>

#include "plan/signature.h"
#include "transport/transport.h"

namespace pipecomm {
namespace {

TensorRef shown_tensor(const ExchangePlan& plan) {
  const TensorSpec* shown = plan.shown              ? &*plan.shown
                            : !plan.inputs.empty()  ? &plan.inputs[0]
                            : !plan.outputs.empty() ? &plan.outputs[0]
                                                    : nullptr;
  TensorRef tensor;
  if (!shown) return tensor;
  tensor.dtype = shown->dtype;
  tensor.shape = shown->shape;
  return tensor;
}

// Goes through the messages of one direction, as peers increase.
class Messages {
 public:
  explicit Messages(const std::vector<LoweredMessage>& messages)
      : next_(messages.begin()), end_(messages.end()) {}

  const LoweredMessage* with(int peer) {
    return next_ != end_ && next_->peer == peer ? &*next_++ : nullptr;
  }
  void check_end() const {
    if (next_ != end_)
      throw std::invalid_argument("the plan has a message for rank " + std::to_string(next_->peer) +
                                  ", which is not a member");
  }

 private:
  std::vector<LoweredMessage>::const_iterator next_, end_;
};

}  // namespace

std::vector<PeerMessages> exchange_messages(OpCode op, int channel, const ExchangePlan& plan,
                                            const LoweredExchange& lowered,
                                            std::span<const int> peers, uint64_t gradient_of) {
  const uint64_t salt = gradient_of * 0x9e3779b97f4a7c15;  // spreads numbers over all bits
  const Descriptor empty = describe(op, channel, shown_tensor(plan), plan.signature ^ salt, 0);
  const auto description = [&](const LoweredMessage* message) {
    Descriptor descriptor = empty;
    if (message) {
      descriptor.signature ^= message->dtypes;
      descriptor.num_bytes = message->bytes;
    }
    return descriptor;
  };
  Messages sends(lowered.sends), recvs(lowered.recvs);
  std::vector<PeerMessages> messages;
  messages.reserve(peers.size());
  for (const int peer : peers) {
    const LoweredMessage* const send = sends.with(peer);
    const LoweredMessage* const recv = recvs.with(peer);
    messages.push_back({peer, description(send), description(recv), send, recv});
  }
  sends.check_end();
  recvs.check_end();
  return messages;
}

std::vector<PeerMessages> broadcast_messages(const TensorRef& tensor, int rank, int source,
                                             std::span<const int> peers) {
  const uint64_t signature =
      Signature("broadcast").add(source).add(tensor.dtype).add(tensor.shape).value();
  const auto description = [&](int sender) {
    return describe(OpCode::broadcast, kCollectiveChannel, tensor, signature,
                    sender == source ? tensor.num_bytes() : 0);
  };
  std::vector<PeerMessages> messages;
  for (const int peer : peers) messages.push_back({peer, description(rank), description(peer)});
  return messages;
}

}  // namespace pipecomm
