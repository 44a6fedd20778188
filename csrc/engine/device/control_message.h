// The messages that device executions send each other over the host transport, while NCCL moves the
// data.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "message/descriptor.h"
#include "message/operation.h"

namespace pipecomm {

struct ControlMessage {
  enum class Kind : uint8_t {
    // About a link, see links.h. Kinds that may come first carry its ranks as payload.
    invite,
    ask,  // number: the common host of the ranks that have asked so far; 0: several
    offer,
    join,
    go,      // number: whether all ranks are on one host; payload: NCCL's id
    refuse,  // number: the rank that refuses
    meet,    // number: the round
    // About the messages of a channel in one direction, as the sender of this one sees it.
    closing,  // number: how many there have been; there will be no more
    claim,  // a description of one of them, see message_check.h; payload: why it is refused, if so
  };

  Kind kind = Kind::invite;
  int channel = 0;
  bool is_one_way = false;  // of the link
  Direction direction = Direction::send;
  uint64_t link = 0;  // a hash of its ranks and channel
  uint64_t number = 0;
  Descriptor descriptor = {};  // of a claim
  std::vector<std::byte> payload = {};

  bool has_ranks() const {
    return kind == Kind::invite || kind == Kind::ask || kind == Kind::refuse;
  }
  std::vector<std::byte> encoded() const;
  // Throws std::runtime_error unless each field has a value that it may have.
  static ControlMessage decoded(std::span<const std::byte> bytes);
};

}  // namespace pipecomm
