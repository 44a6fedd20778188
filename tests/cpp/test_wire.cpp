// Control packets and failure records are read back as they were written, and any sequence of bytes
// at worst raises an error.

#include "check.h"
#include "message/failure.h"
#include "transport/tcp/wire.h"
#include "transport/transport.h"
#include "world.h"

using wire::Kind;
using wire::PacketReader;
using wire::PacketWriter;
using world::Random;

using Bytes = std::vector<std::byte>;

constexpr uint32_t kEpoch = 0xfeedbeef;

// The kinds, and those that carry a descriptor, as an independent copy.
constexpr Kind kKinds[] = {Kind::data,    Kind::announce, Kind::refuse,  Kind::accept,
                           Kind::reject,  Kind::refused,  Kind::failure, Kind::closing,
                           Kind::goodbye, Kind::control,  Kind::ready};
bool carries_descriptor(Kind kind) {
  return kind == Kind::data || kind == Kind::announce || kind == Kind::reject ||
         kind == Kind::ready;
}

Bytes random_bytes(size_t num_bytes, Random& random) {
  Bytes bytes(num_bytes);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random.between(0, 255));
  return bytes;
}

Descriptor random_descriptor(Random& random) {
  Descriptor descriptor;
  descriptor.op = static_cast<OpCode>(random.between(1, 7));
  descriptor.dtype = uint8_t(random.between(0, 255));
  descriptor.num_dims = uint8_t(random.between(0, 255));
  descriptor.channel = uint8_t(random.between(0, kNumChannels - 1));
  descriptor.seq = uint64_t(random.between(INT64_MIN, INT64_MAX));
  descriptor.signature = uint64_t(random.between(INT64_MIN, INT64_MAX));
  descriptor.num_bytes = random.between(0, INT64_MAX);
  for (int64_t& extent : descriptor.shape) extent = random.between(0, INT64_MAX);
  return descriptor;
}

bool same(const Descriptor& a, const Descriptor& b) {
  return a.op == b.op && a.dtype == b.dtype && a.num_dims == b.num_dims && a.channel == b.channel &&
         a.seq == b.seq && a.signature == b.signature && a.num_bytes == b.num_bytes &&
         a.shape == b.shape;
}

struct Sample {
  Kind kind;
  int channel;
  uint64_t seq;
  std::optional<Descriptor> descriptor;
  Bytes payload;
};

Sample random_sample(Random& random) {
  const Kind kind = kKinds[random.between(0, std::size(kKinds) - 1)];
  Sample sample{kind, int(random.between(0, kNumChannels - 1)),
                uint64_t(random.between(INT64_MIN, INT64_MAX)), std::nullopt,
                random_bytes(random.between(0, random.chance(0.1) ? 5000 : 40), random)};
  if ((kind == Kind::refuse || kind == Kind::refused) &&
      sample.payload.size() > wire::kMaxTextBytes)
    sample.payload.resize(wire::kMaxTextBytes);
  if (carries_descriptor(kind)) {
    sample.descriptor = random_descriptor(random);
    if (kind == Kind::data) sample.descriptor->num_bytes = int64_t(sample.payload.size());
  }
  return sample;
}

bool add(PacketWriter& writer, const Sample& sample) {
  return writer.add(sample.kind, sample.channel, sample.seq,
                    sample.descriptor ? &*sample.descriptor : nullptr, sample.payload);
}

#define CHECK_MALFORMED(text, packet) \
  CHECK_THROWS(std::runtime_error, text, PacketReader(packet, kEpoch))

TEST(round_trip) {
  for (int seed = 0; seed < check::rounds(300); ++seed) {
    check::context = "round trip, seed " + std::to_string(seed);
    Random random(seed);
    PacketWriter writer;
    CHECK(writer.empty());
    std::vector<Sample> samples;
    for (int64_t left = random.between(1, 60); left > 0; --left) {
      Sample sample = random_sample(random);
      if (!add(writer, sample)) break;
      samples.push_back(std::move(sample));
    }
    CHECK(!writer.empty());
    const auto number = uint64_t(random.between(INT64_MIN, INT64_MAX));
    Bytes packet = writer.take(kEpoch, number);
    CHECK(writer.empty());
    CHECK(packet.size() <= wire::kMaxPacketBytes);
    const size_t num_bytes = packet.size();
    if (random.chance(0.5)) packet.resize(wire::kMaxPacketBytes);  // as it lies in a slot
    const PacketReader reader(packet, kEpoch);
    CHECK_EQ(reader.header().packet_number, number);
    CHECK_EQ(wire::packet_bytes(packet, kEpoch), num_bytes);
    CHECK(!wire::piece_header(packet, kEpoch));
    CHECK_EQ(reader.header().num_bytes, num_bytes);
    CHECK_EQ(reader.records().size(), samples.size());
    for (size_t idx = 0; idx < std::min(samples.size(), reader.records().size()); ++idx) {
      const wire::Record& record = reader.records()[idx];
      const Sample& sample = samples[idx];
      CHECK(record.header.kind == sample.kind);
      CHECK_EQ(int{record.header.channel}, sample.channel);
      CHECK_EQ(record.header.seq, sample.seq);
      CHECK(std::ranges::equal(record.payload, sample.payload));
      CHECK_EQ(record.header.has_descriptor != 0, sample.descriptor.has_value());
      if (sample.descriptor) CHECK(same(record.descriptor, *sample.descriptor));
    }
  }
}

// The largest payload fits, one byte more does not, and a refused record leaves no trace.
TEST(limits) {
  Random random(1);
  Descriptor descriptor = random_descriptor(random);
  PacketWriter writer;
  const Bytes largest = random_bytes(wire::kMaxPayloadBytes, random);
  const Bytes larger = random_bytes(wire::kMaxPayloadBytes + 1, random);
  descriptor.num_bytes = int64_t(larger.size());
  CHECK(!writer.add(Kind::data, 0, 0, &descriptor, larger));
  CHECK(writer.empty());
  descriptor.num_bytes = int64_t(largest.size());
  CHECK(writer.add(Kind::data, 0, 0, &descriptor, largest));
  CHECK(!writer.add(Kind::accept, 0, 0, nullptr, {}));
  const Bytes packet = writer.take(kEpoch, 1);
  CHECK_EQ(packet.size(), wire::kMaxPacketBytes);
  CHECK_EQ(PacketReader(packet, kEpoch).records().size(), 1u);
}

template <class T>
Bytes with(Bytes packet, size_t offset, T value) {
  std::memcpy(packet.data() + offset, &value, sizeof value);
  return packet;
}

TEST(malformed) {
  constexpr size_t kRecord = sizeof(wire::PacketHeader);
  constexpr size_t kDescriptor = kRecord + sizeof(wire::RecordHeader);
  PacketWriter writer;
  Descriptor descriptor;
  descriptor.num_bytes = 8;
  writer.add(Kind::data, 3, 5, &descriptor, Bytes(8));
  const Bytes good = writer.take(kEpoch, 1);
  CHECK_EQ(PacketReader(good, kEpoch).records().size(), 1u);

  CHECK_MALFORMED("its header is cut off", Bytes(kRecord - 1));
  CHECK_MALFORMED("wrong magic number", with(good, 0, uint32_t{1}));
  CHECK_MALFORMED("protocol version 9", with(good, 4, uint16_t{9}));
  CHECK_MALFORMED("belongs to another communicator", with(good, 8, kEpoch + 1));
  CHECK_MALFORMED("wrong length", with(good, 12, uint32_t{kRecord - 1}));
  CHECK_MALFORMED("wrong length", with(good, 12, uint32_t(good.size() + 1)));
  CHECK_MALFORMED("bytes after the last record", with(good, 6, uint16_t{0}));
  CHECK_MALFORMED("a record header is cut off", with(good, 6, uint16_t{2}));
  CHECK_MALFORMED("unknown record kind 0", with(good, kRecord, uint8_t{0}));
  CHECK_MALFORMED("unknown record kind 200", with(good, kRecord, uint8_t{200}));
  CHECK_MALFORMED("channel out of range", with(good, kRecord + 1, uint8_t{kNumChannels}));
  CHECK_MALFORMED("descriptor where none belongs", with(good, kRecord + 2, uint16_t{0}));
  CHECK_MALFORMED("descriptor where none belongs", with(good, kRecord, uint8_t(Kind::accept)));
  CHECK_MALFORMED("a payload is cut off", with(good, kRecord + 4, uint32_t{9}));
  CHECK_MALFORMED("a payload is cut off", with(good, kRecord + 4, UINT32_MAX));
  CHECK_MALFORMED("differ in size", with(good, kRecord + 4, uint32_t{7}));
  CHECK_MALFORMED("negative size", with(good, kDescriptor + 24, int64_t{-1}));
  CHECK_MALFORMED("negative extent", with(good, kDescriptor + 32, int64_t{-1}));
  Bytes cut = with(good, 12, uint32_t{kDescriptor + 10});
  cut.resize(kDescriptor + 10);
  CHECK_MALFORMED("a descriptor is cut off", cut);
  CHECK_MALFORMED("wrong length", with(good, 12, uint32_t(wire::kMaxPacketBytes + 1)));
}

TEST(pieces) {
  const wire::PieceHeader header{.channel = 3, .epoch = kEpoch, .num_bytes = 9, .seq = 7};
  Bytes bytes(sizeof header + 2);
  std::memcpy(bytes.data(), &header, sizeof header);
  const auto read = wire::piece_header(bytes, kEpoch);
  CHECK(read && read->channel == 3 && read->num_bytes == 9 && read->seq == 7);
  const auto expect_malformed = [](const std::string& text, const Bytes& malformed) {
    CHECK_THROWS(std::runtime_error, text, wire::piece_header(malformed, kEpoch));
  };
  expect_malformed("its header is cut off", Bytes(sizeof header - 1));
  expect_malformed("belongs to another communicator", with(bytes, 8, kEpoch + 1));
  expect_malformed("channel out of range", with(bytes, 4, uint32_t{kNumChannels}));
}

std::string random_text(size_t max_bytes, Random& random) {
  std::string text(random.between(0, max_bytes), ' ');
  for (char& c : text) c = static_cast<char>(random.between(-128, 127));
  return text;
}

Failure random_failure(Random& random) {
  Failure failure;
  failure.kind = static_cast<FailureKind>(random.between(0, 4));
  failure.message = random_text(300, random);
  failure.op = random_text(20, random);
  failure.dtype = random_text(20, random);
  for (int* field : {&failure.rank, &failure.peer, &failure.channel, &failure.origin_rank})
    *field = int(random.between(-1, 5000));
  failure.seq = random.between(-1, INT64_MAX);
  for (int64_t left = random.between(0, 12); left > 0; --left)
    failure.shape.push_back(random.between(0, INT64_MAX));
  for (auto* side : {&failure.ours, &failure.theirs})
    if (random.between(0, 1) == 1)
      *side = {random_text(20, random), random_text(20, random), failure.shape,
               random.between(0, INT64_MAX)};
  return failure;
}

TEST(failures) {
  Random random(7);
  for (int case_idx = 0; case_idx < 300; ++case_idx) {
    check::context = "failure record " + std::to_string(case_idx);
    const Failure failure = random_failure(random);
    CHECK(decode_failure(encode_failure(failure)) == failure);
  }
  check::context = "long failure";
  const std::string long_text(1 << 20, 'm');
  const std::vector<int64_t> many_dims(1000, 1);
  Failure longest{.message = long_text, .op = long_text, .dtype = long_text, .shape = many_dims};
  longest.ours = longest.theirs = {long_text, long_text, many_dims, 1};
  const Bytes bytes = encode_failure(longest);
  CHECK(bytes.size() < wire::kMaxPayloadBytes);  // so it always fits a packet
  CHECK_EQ(decode_failure(bytes).message, std::string(2048, 'm'));
}

// A few bytes changed, numbers at their limits, cut off, extended, or two packets spliced.
void mutate(Bytes& bytes, const Bytes& other, Random& random) {
  for (int64_t left = random.between(1, 4); left > 0 && !bytes.empty(); --left) {
    const auto at = size_t(random.between(0, bytes.size() - 1));
    switch (random.between(0, 5)) {
      case 0:
        bytes[at] = static_cast<std::byte>(random.between(0, 255));
        break;
      case 1: {
        const uint64_t extremes[] = {0, 1, 0x7fffffff, 0xffffffff, uint64_t(INT64_MAX), UINT64_MAX};
        const uint64_t value = extremes[random.between(0, 5)];
        const size_t num_bytes = std::min<size_t>(size_t{1} << random.between(0, 3), bytes.size());
        std::memcpy(bytes.data() + std::min(at, bytes.size() - num_bytes), &value, num_bytes);
        break;
      }
      case 2:
        bytes.resize(at);
        break;
      case 3:
        bytes.resize(bytes.size() + random.between(1, 100), std::byte{0x5a});
        break;
      case 4:
        if (at >= other.size()) break;
        bytes.resize(other.size());
        std::copy(other.begin() + at, other.end(), bytes.begin() + at);
        break;
      default:
        bytes[at] ^= std::byte{1} << random.between(0, 7);
    }
  }
}

// Gives `read` mutations of the samples, in memory exactly as large as what may be read. It takes
// some of them: the mutations are neither all harmless nor all refused at the first byte.
void fuzz(const std::vector<Bytes>& samples, int num_cases, Random& random,
          const std::function<void(std::span<const std::byte>)>& read) {
  int num_taken = 0;
  for (int idx = 0; idx < num_cases; ++idx) {
    check::context = "fuzzed bytes " + std::to_string(idx);
    Bytes bytes = samples[random.between(0, samples.size() - 1)];
    mutate(bytes, samples[random.between(0, samples.size() - 1)], random);
    const auto memory = std::make_unique<std::byte[]>(bytes.size());
    std::copy(bytes.begin(), bytes.end(), memory.get());
    try {
      read({memory.get(), bytes.size()});
      ++num_taken;
    } catch (const std::runtime_error&) {
    }
  }
  CHECK(num_taken > num_cases / 20 && num_taken < num_cases * 9 / 10);
}

TEST(fuzz_packets) {
  Random random(11);
  std::vector<Bytes> packets;
  for (int idx = 0; idx < 64; ++idx) {
    PacketWriter writer;
    for (int64_t left = random.between(1, 6); left > 0; --left) add(writer, random_sample(random));
    packets.push_back(writer.take(kEpoch, idx));
  }
  size_t num_seen = 0;
  fuzz(packets, check::rounds(200'000), random, [&](std::span<const std::byte> bytes) {
    const PacketReader reader(bytes, kEpoch);
    for (const wire::Record& record : reader.records()) {
      for (std::byte byte : record.payload) num_seen += size_t(byte) & 1;
      num_seen += record.descriptor.text().size();
      CHECK(record.header.channel < kNumChannels);
      CHECK(record.descriptor.num_bytes >= 0);
    }
  });
  CHECK(num_seen > 0);
}

TEST(fuzz_failures) {
  Random random(13);
  std::vector<Bytes> records;
  for (int idx = 0; idx < 64; ++idx) records.push_back(encode_failure(random_failure(random)));
  fuzz(records, check::rounds(50'000), random, [](std::span<const std::byte> bytes) {
    const Failure failure = decode_failure(bytes);
    CHECK(failure.message.size() <= bytes.size());
    CHECK(int(failure.kind) <= 4);
  });
}
