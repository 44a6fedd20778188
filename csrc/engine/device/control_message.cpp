#include "engine/device/control_message.h"

#include "message/bytes.h"
#include "transport/nccl/nccl_api.h"
#include "transport/transport.h"

namespace pipecomm {
namespace {

struct Header {
  uint8_t kind, channel, is_one_way, direction;
  uint32_t num_payload_bytes;
  uint64_t link, number;
};
static_assert(sizeof(Header) == 24);

}  // namespace

std::vector<std::byte> ControlMessage::encoded() const {
  std::vector<std::byte> bytes;
  const Header header{uint8_t(kind),
                      uint8_t(channel),
                      is_one_way,
                      uint8_t(direction),
                      uint32_t(payload.size()),
                      link,
                      number};
  append(bytes, &header, sizeof header);
  if (kind == Kind::claim) append(bytes, descriptor);
  append(bytes, payload.data(), payload.size());
  return bytes;
}

ControlMessage ControlMessage::decoded(std::span<const std::byte> bytes) {
  ByteReader in(bytes, "control message");
  const auto header = in.value<Header>("its header");
  if (header.kind > uint8_t(Kind::claim)) in.fail("unknown kind");
  if (header.channel > kCollectiveChannel) in.fail("channel out of range");
  if (header.is_one_way > 1 || header.direction > 1) in.fail("no such direction");
  ControlMessage message{.kind = Kind(header.kind),
                         .channel = header.channel,
                         .is_one_way = header.is_one_way == 1,
                         .direction = Direction(header.direction),
                         .link = header.link,
                         .number = header.number};
  if (message.kind == Kind::claim) message.descriptor = read_descriptor(in);
  const auto payload = in.take(header.num_payload_bytes, "its payload");
  message.payload.assign(payload.begin(), payload.end());
  const bool has_form = message.has_ranks()           ? payload.size() % sizeof(int) == 0
                        : message.kind == Kind::go    ? payload.size() == sizeof(NcclUniqueId)
                        : message.kind == Kind::claim ? true
                                                      : payload.empty();
  if (!has_form || !in.at_end()) in.fail("wrong length");
  return message;
}

}  // namespace pipecomm
