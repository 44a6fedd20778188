#include "engine/peer_messages.h"

#include <algorithm>
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

}  // namespace

Descriptor empty_message(OpCode op, int channel, const ExchangePlan& plan, uint64_t gradient_of) {
  const uint64_t salt = gradient_of * 0x9e3779b97f4a7c15;  // spreads numbers over all bits
  return describe(op, channel, shown_tensor(plan), plan.signature ^ salt, 0);
}

std::vector<int> peers_of(const LoweredExchange& lowered) {
  std::vector<int> peers;
  for (const auto* messages : {&lowered.sends, &lowered.recvs})
    for (const LoweredMessage& message : *messages)
      if (message.bytes > 0) peers.push_back(message.peer);
  std::sort(peers.begin(), peers.end());
  peers.erase(std::unique(peers.begin(), peers.end()), peers.end());
  return peers;
}

void check_peers(const LoweredExchange& lowered, std::span<const int> peers) {
  for (const auto* messages : {&lowered.sends, &lowered.recvs})
    for (const LoweredMessage& message : *messages)
      if (!std::binary_search(peers.begin(), peers.end(), message.peer))
        throw std::invalid_argument("the plan has a message for rank " +
                                    std::to_string(message.peer) + ", which is not a member");
}

std::vector<PeerMessages> exchange_messages(OpCode op, int channel, const ExchangePlan& plan,
                                            const LoweredExchange& lowered,
                                            std::span<const int> peers) {
  const Descriptor empty = empty_message(op, channel, plan, 0);
  MessagesByPeer sends(lowered.sends), recvs(lowered.recvs);
  std::vector<PeerMessages> messages;
  messages.reserve(peers.size());
  for (const int peer : peers) {
    const LoweredMessage* const send = sends.with(peer);
    const LoweredMessage* const recv = recvs.with(peer);
    messages.push_back({peer, described(empty, send), described(empty, recv), send, recv});
  }
  return messages;
}

Descriptor broadcast_message(const TensorRef& tensor, int source) {
  const uint64_t signature =
      Signature("broadcast").add(source).add(tensor.dtype).add(tensor.shape).value();
  return describe(OpCode::broadcast, kCollectiveChannel, tensor, signature, tensor.num_bytes());
}

std::vector<PeerMessages> broadcast_messages(const TensorRef& tensor, int rank, int source,
                                             std::span<const int> peers) {
  const Descriptor whole = broadcast_message(tensor, source);
  const auto description = [&](int sender) {
    Descriptor descriptor = whole;
    if (sender != source) descriptor.num_bytes = 0;
    return descriptor;
  };
  std::vector<PeerMessages> messages;
  for (const int peer : peers) messages.push_back({peer, description(rank), description(peer)});
  return messages;
}

}  // namespace pipecomm
