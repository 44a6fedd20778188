// Matches a message with a receive: the same rules and error texts for every transport.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "message/operation.h"

namespace pipecomm {

enum class Meeting : uint8_t {
  agree,         // the payload goes to its place, the sender gets "accepted"
  peer_refuses,  // the sender takes no part: accepted, the receive fails unless it also refuses
  self_refuses,  // the receiver takes no part: the sender gets the reason
  disagree,      // both ends fail with both descriptions, nothing is transferred
};

// `recv` is the next receive in its order, and the message is the next to arrive.
Meeting meet(const Request& recv, bool message_refuses, const Descriptor& message);

// The failure of `request` on `rank`, whose peer ...
FailurePtr mismatch_failure(int rank, const Request& request, const Descriptor& theirs);
FailurePtr refusal_failure(int rank, const Request& request, std::string_view reason);
// ... will never match it. `peer_text` is the reason: "has closed its communicator".
FailurePtr gone_failure(int rank, const Request& request, const std::string& peer_text);
// ... answered a send with a refusal: only a rank that closes refuses point-to-point messages.
FailurePtr refused_send_failure(int rank, const Request& send, std::string_view reason,
                                const std::string& peer_text);

}  // namespace pipecomm
