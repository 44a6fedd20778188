#include "transport/tcp/wire.h"

#include <cstring>
#include <utility>

#include "message/bytes.h"
#include "transport/transport.h"

namespace pipecomm::wire {
namespace {

constexpr size_t kAlign = 8;
constexpr size_t aligned(size_t num_bytes) { return (num_bytes + kAlign - 1) / kAlign * kAlign; }

}  // namespace

bool PacketWriter::add(Kind kind, int channel, uint64_t seq, const Descriptor* descriptor,
                       std::span<const std::byte> payload) {
  if (bytes_.empty()) bytes_.resize(sizeof(PacketHeader));
  const size_t num_new =
      sizeof(RecordHeader) + (descriptor ? kDescriptorBytes : 0) + aligned(payload.size());
  if (bytes_.size() + num_new > kMaxPacketBytes || num_records_ == UINT16_MAX) return false;
  RecordHeader header{kind, static_cast<uint8_t>(channel), descriptor != nullptr,
                      static_cast<uint32_t>(payload.size()), seq};
  append(bytes_, &header, sizeof header);
  if (descriptor) append(bytes_, *descriptor);
  append(bytes_, payload.data(), payload.size());
  bytes_.resize(bytes_.size() + aligned(payload.size()) - payload.size());
  ++num_records_;
  return true;
}

std::vector<std::byte> PacketWriter::take(uint32_t epoch, uint64_t packet_number) {
  if (bytes_.empty()) bytes_.resize(sizeof(PacketHeader));
  PacketHeader header;
  header.num_records = num_records_;
  header.epoch = epoch;
  header.packet_number = packet_number;
  header.num_bytes = static_cast<uint32_t>(bytes_.size());
  std::memcpy(bytes_.data(), &header, sizeof header);
  num_records_ = 0;
  return std::exchange(bytes_, {});
}

size_t packet_bytes(std::span<const std::byte> bytes, uint32_t epoch) {
  ByteReader in(bytes, "packet");
  const auto header = in.value<PacketHeader>("its header");
  if (header.magic != kMagic) in.fail("wrong magic number");
  if (header.version != kVersion)
    in.fail("protocol version " + std::to_string(header.version) + ", this rank speaks " +
            std::to_string(kVersion) + "; install the same pipecomm_ext on all ranks");
  if (header.epoch != epoch) in.fail("it belongs to another communicator");
  if (header.num_bytes < sizeof header || header.num_bytes > kMaxPacketBytes)
    in.fail("wrong length");
  return header.num_bytes;
}

std::optional<PieceHeader> piece_header(std::span<const std::byte> bytes, uint32_t epoch) {
  ByteReader in(bytes, "piece of a body");
  const auto header = in.value<PieceHeader>("its header");
  if (header.magic != kPieceMagic) return std::nullopt;
  if (header.epoch != epoch) in.fail("it belongs to another communicator");
  if (header.channel >= kNumChannels) in.fail("channel out of range");
  return header;
}

PacketReader::PacketReader(std::span<const std::byte> packet, uint32_t epoch) {
  const size_t num_bytes = packet_bytes(packet, epoch);
  ByteReader whole(packet, "packet");
  header_ = whole.value<PacketHeader>("its header");
  if (num_bytes > packet.size()) whole.fail("wrong length");
  ByteReader in(packet.first(header_.num_bytes).subspan(sizeof header_), "packet");
  records_.reserve(header_.num_records);
  for (int record_idx = 0; record_idx < header_.num_records; ++record_idx) {
    Record& record = records_.emplace_back();
    record.header = in.value<RecordHeader>("a record header");
    if (record.header.channel >= kNumChannels) in.fail("channel out of range");
    const Kind kind = record.header.kind;
    if (kind < Kind::data || kind > Kind::ready)
      in.fail("unknown record kind " + std::to_string(static_cast<int>(kind)));
    const bool needs_descriptor =
        kind == Kind::data || kind == Kind::announce || kind == Kind::reject || kind == Kind::ready;
    if ((record.header.has_descriptor != 0) != needs_descriptor)
      in.fail("descriptor where none belongs, or none");
    if (needs_descriptor) record.descriptor = read_descriptor(in);
    const size_t num_payload_bytes = record.header.num_payload_bytes;
    record.payload = in.take(aligned(num_payload_bytes), "a payload").first(num_payload_bytes);
    if ((kind == Kind::refuse || kind == Kind::refused) && num_payload_bytes > kMaxTextBytes)
      in.fail("text too long");
    if (kind == Kind::data &&
        static_cast<int64_t>(num_payload_bytes) != record.descriptor.num_bytes)
      in.fail("payload and description differ in size");
  }
  if (!in.at_end()) in.fail("bytes after the last record");
}

}  // namespace pipecomm::wire
