// The wire format of a connection: packets of records, and pieces of bodies, in a fixed
// little-endian layout. Every length that comes from a peer is checked before use. A packet carries
// several records: a batch of small messages to one peer is one packet.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "message/descriptor.h"

namespace pipecomm::wire {

inline constexpr uint32_t kMagic = 0x31584350;  // "PCX1"
inline constexpr uint16_t kVersion = 6;
inline constexpr size_t kMaxPacketBytes = 64 * 1024;
inline constexpr size_t kMaxTextBytes = 4096;

enum class Kind : uint8_t {
  data = 1,      // descriptor + the whole payload
  announce = 2,  // descriptor; the payload follows in pieces once the receiver is ready
  refuse = 3,    // text: this end takes no part in the next collective on the channel
  accept = 4,    // the message was matched and (for data) copied to its place
  reject = 5,    // descriptor of what the receiver expected instead
  refused = 6,   // text: the receiver takes no part
  failure = 7,   // an encoded Failure: the sender's communicator is unusable
  closing = 8,   // the sender posts nothing more
  goodbye = 9,   // the sender is about to disconnect
  control = 10,  // bytes for the peer's owner, see HostTransport::send_control
  ready = 11,    // descriptor of a large receive: its body may be written at once
};

struct PacketHeader {
  uint32_t magic = kMagic;
  uint16_t version = kVersion;
  uint16_t num_records = 0;
  uint32_t epoch = 0;          // random per communicator
  uint32_t num_bytes = 0;      // of the whole packet
  uint64_t packet_number = 0;  // counts packets to this destination, from 1
};
static_assert(sizeof(PacketHeader) == 24);

inline constexpr uint32_t kPieceMagic = 0x31425850;  // "PXB1"

// Precedes a piece of a body; pieces of one body come in order.
struct PieceHeader {
  uint32_t magic = kPieceMagic;
  uint32_t channel = 0;
  uint32_t epoch = 0;
  uint32_t num_bytes = 0;  // of the piece
  uint64_t seq = 0;
};
static_assert(sizeof(PieceHeader) == sizeof(PacketHeader));
inline constexpr size_t kFrameHeaderBytes = sizeof(PacketHeader);

struct RecordHeader {
  Kind kind{};
  uint8_t channel = 0;
  uint16_t has_descriptor = 0;
  uint32_t num_payload_bytes = 0;
  uint64_t seq = 0;
};
static_assert(sizeof(RecordHeader) == 16);

struct Record {
  RecordHeader header;
  Descriptor descriptor;               // valid if header.has_descriptor
  std::span<const std::byte> payload;  // points into the packet
  std::string_view text() const {
    return {reinterpret_cast<const char*>(payload.data()), payload.size()};
  }
};

// Largest payload that always fits an empty packet.
inline constexpr size_t kMaxPayloadBytes =
    kMaxPacketBytes - sizeof(PacketHeader) - sizeof(RecordHeader) - kDescriptorBytes;

class PacketWriter {
 public:
  bool empty() const { return num_records_ == 0; }
  // Returns false and writes nothing if the record does not fit any more.
  bool add(Kind kind, int channel, uint64_t seq, const Descriptor* descriptor,
           std::span<const std::byte> payload);
  // Ends the packet, which may have no records, and starts the next one.
  std::vector<std::byte> take(uint32_t epoch, uint64_t packet_number);

 private:
  std::vector<std::byte> bytes_;
  uint16_t num_records_ = 0;
};

// The length of the packet that begins with these kFrameHeaderBytes. Throws std::runtime_error as
// PacketReader does.
size_t packet_bytes(std::span<const std::byte> header, uint32_t epoch);
// None if these bytes are not the header of a piece.
std::optional<PieceHeader> piece_header(std::span<const std::byte> header, uint32_t epoch);

// Checks the whole packet before it returns the first record. Throws std::runtime_error if anything
// is wrong.
class PacketReader {
 public:
  PacketReader(std::span<const std::byte> packet, uint32_t epoch);
  const PacketHeader& header() const { return header_; }
  const std::vector<Record>& records() const { return records_; }

 private:
  PacketHeader header_;
  std::vector<Record> records_;
};

}  // namespace pipecomm::wire
