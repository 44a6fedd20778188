// Shared memory with a peer that writes arbitrary data: this rank must continue or report that the
// peer breaks the protocol, and never access memory that is not its own. One thread runs both ends
// of real lanes, with words, records, grants and verdicts of the other end overwritten in between.
// Run it under AddressSanitizer; payloads are in blocks of exactly their size.

#include "check.h"
#include "engine/point_to_point.h"
#include "message/flight_record.h"
#include "message/operation.h"
#include "transport/shm/lane.h"
#include "transport/shm/window.h"

constexpr int64_t kRingBytes = shm::kMinRingBytes;
constexpr int64_t kWindowBytes = 256 << 10;
constexpr int kNumSteps = 60;
constexpr int kCollectiveLane = 1;
constexpr DType kByte{0, 1};

struct Random {
  std::mt19937_64 engine;
  uint64_t below(uint64_t end) { return engine() % end; }
  bool one_in(uint64_t count) { return below(count) == 0; }
  // Mostly near what is sensible, sometimes anything.
  uint64_t around(uint64_t value) {
    switch (below(6)) {
      case 0:
        return engine();
      case 1:
        return below(4);
      case 2:
        return UINT64_MAX - below(4);
      case 3:
        return value ^ uint64_t{1} << below(64);
      default:
        return value + below(300) - 150;
    }
  }
};

// One end of a pair of lanes: a rank as its transport has it, without threads.
struct Rank {
  Rank(int rank, const std::vector<shm::SegmentPtr>& segments)
      : pool(segments[rank]), multicast(*segments[rank], [this](int, uint64_t seq) {
          return outbound[kCollectiveLane]->is_final_for_receiver(seq);
        }) {
    multicast.add_reader(1 - rank, segments[1 - rank]->status().bell);
    context.rank = rank;
    context.epoch = 7;
    context.window = &pool;
    for (int lane = 0; lane < 2; ++lane) {
      outbound[lane].emplace(context, *segments[1 - rank], lane);
      inbound[lane].emplace(context, *segments[rank], *segments[1 - rank], lane);
    }
  }

  void advance() {
    for (int lane = 0; lane < 2; ++lane) {
      outbound[lane]->advance();
      inbound[lane]->advance();
    }
    multicast.advance();
  }

  shm::LaneContext context;
  shm::WindowPool pool;
  std::optional<shm::Outbound> outbound[2];
  std::optional<shm::Inbound> inbound[2];
  shm::MulticastWriter multicast;
};

struct Message {
  RequestPtr request;
  std::unique_ptr<std::byte[]> heap;
  std::shared_ptr<std::byte> window;
};

class Round {
 public:
  explicit Round(uint64_t seed) : random_{std::mt19937_64(seed)} {
    const shm::SegmentShape shape{.size = 2,
                                  .num_channels = 1,
                                  .ring_bytes = kRingBytes,
                                  .window_bytes = kWindowBytes,
                                  .epoch = 7};
    for (int rank : {0, 1}) segments_.push_back(shm::Segment::create(rank, shape));
    for (int rank : {0, 1}) ranks_[rank] = std::make_unique<Rank>(rank, segments_);
  }
  Round(const Round&) = delete;
  Round& operator=(const Round&) = delete;

  // As a transport does at its end: drops unfinished requests.
  ~Round() {
    for (const auto& rank : ranks_) {
      for (int lane = 0; lane < 2; ++lane) {
        rank->outbound[lane]->drop();
        rank->inbound[lane]->drop();
      }
      rank->multicast.drop();
    }
  }

  // Whether rank 0 detected the violation.
  bool run() {
    for (int step = 0; step < kNumSteps; ++step) {
      if (random_.one_in(2)) post(random_.one_in(5));
      if (random_.one_in(3)) ruin();
      // The corrupted data may also confuse rank 1: it may then fail, and sends nothing more.
      if (!silent_) {
        try {
          ranks_[1]->advance();
        } catch (const std::runtime_error&) {
          silent_ = true;
        }
      }
      try {
        ranks_[0]->advance();
      } catch (const std::runtime_error& error) {
        CHECK(std::strlen(error.what()) > 0);
        return true;
      }
      take_settled();
    }
    return false;
  }

  int num_settled() const { return num_settled_; }
  int num_delivered() const { return num_delivered_; }

 private:
  // A message between the two ranks, whose ends may disagree.
  void post(bool is_multicast) {
    static constexpr int64_t kSizes[] = {0, 1, 128, 4096, 16384, 16385, 40000, 70000, 200000};
    const int lane = is_multicast ? kCollectiveLane : int(random_.below(2));
    const int sender = int(random_.below(2));
    int64_t num_bytes = kSizes[random_.below(std::size(kSizes))];
    for (int rank : {sender, 1 - sender}) {
      Message& message = messages_.emplace_back();
      message.request = std::make_shared<Request>();
      Request& request = *message.request;
      request.direction = rank == sender ? Direction::send : Direction::recv;
      request.peer = 1 - rank;
      const TensorRef tensor{nullptr, kByte, {num_bytes}, {1}, nullptr};
      request.descriptor =
          describe(is_multicast ? OpCode::broadcast : OpCode::p2p, lane, tensor, 0, num_bytes);
      request.refuses = random_.one_in(20);
      if (request.refuses) request.refusal = std::string(random_.below(5000), 'r');
      if (random_.one_in(2)) message.window = ranks_[rank]->pool.allocate(num_bytes);
      if (!message.window) message.heap = std::make_unique_for_overwrite<std::byte[]>(num_bytes);
      request.data = message.window ? message.window.get() : message.heap.get();
      Rank& end = *ranks_[rank];
      if (request.direction == Direction::recv) {
        end.inbound[lane]->post(message.request);
      } else {
        end.outbound[lane]->post(message.request);
        if (is_multicast && !request.refuses && num_bytes > shm::max_eager_bytes(kRingBytes))
          end.multicast.post({&message.request, 1});
      }
      if (random_.one_in(10)) num_bytes = kSizes[random_.below(std::size(kSizes))];
    }
  }

  // Overwrites some data that rank 1 has written for rank 0.
  void ruin() {
    const int lane_idx = int(random_.below(2));
    shm::Lane& to_us = segments_[0]->lane(1, lane_idx);
    shm::Lane& from_us = segments_[1]->lane(0, lane_idx);
    const auto change = [this](auto& word) {
      word.store(
          static_cast<std::remove_reference_t<decltype(word.load())>>(random_.around(word.load())));
    };
    const std::function<void()> ways[] = {
        [&] { change(to_us.head); },
        [&] { change(to_us.num_final_sends); },
        [&] { change(from_us.tail); },
        [&] { change(from_us.num_answered); },
        [&] { change(from_us.num_granted); },
        [&] { change(from_us.num_final_recvs); },
        [&] { change(from_us.has_verdict); },
        [&] { scribble(&from_us.verdict, sizeof from_us.verdict); },
        [&] { change_grant(from_us.grant); },
        [&] { change(segments_[1]->multicast().head); },
        [&] { change(segments_[0]->multicast().tail_of_rank[1].value); },
        [&] { change_record(segments_[0]->ring(1, lane_idx), to_us.tail.load()); },
        [&] { change_record(segments_[0]->ring(1, lane_idx), to_us.tail.load()); },
    };
    ways[random_.below(std::size(ways))]();
  }

  void scribble(void* memory, size_t num_bytes) {
    auto* const bytes = static_cast<unsigned char*>(memory);
    for (uint64_t count = 1 + random_.below(4); count > 0; --count)
      bytes[random_.below(num_bytes)] = static_cast<unsigned char>(random_.engine());
  }

  void change_grant(shm::Grant& grant) {
    if (random_.one_in(2)) return scribble(&grant, sizeof grant);
    shm::WindowPart& part = grant.parts[random_.below(2)];
    const auto change = [this](auto& field) {
      field = static_cast<std::remove_reference_t<decltype(field)>>(random_.around(field));
    };
    const std::function<void()> ways[] = {
        [&] { grant.kind = static_cast<shm::GrantKind>(random_.below(4)); },
        [&] { change(grant.num_parts); },
        [&] { change(part.position_bytes); },
        [&] { change(part.offset_bytes); },
        [&] { change(part.copy.run_bytes); },
        [&] { change(part.copy.num_dims); },
        [&] {
          change(part.copy.count[0]);
          change(part.copy.dst_stride_bytes[0]);
        },
    };
    ways[random_.below(std::size(ways))]();
  }

  // Fields of the record that rank 0 reads next.
  void change_record(std::byte* ring, uint64_t tail) {
    std::byte* const at = ring + tail % kRingBytes;
    if (tail % kRingBytes + sizeof(shm::RecordHeader) > kRingBytes) return;
    if (random_.one_in(3)) return scribble(at, sizeof(shm::RecordHeader));
    shm::RecordHeader header;
    std::memcpy(&header, at, sizeof header);
    Descriptor& descriptor = header.descriptor;
    switch (random_.below(5)) {
      case 0:
        header.kind = static_cast<shm::RecordKind>(random_.below(8));
        break;
      case 1:
        header.num_inline_bytes = uint32_t(random_.around(header.num_inline_bytes));
        break;
      case 2:
        descriptor.num_bytes = int64_t(random_.around(descriptor.num_bytes));
        if (random_.one_in(2)) header.num_inline_bytes = uint32_t(descriptor.num_bytes);
        break;
      case 3:
        descriptor.seq = random_.around(descriptor.seq);
        break;
      default:
        header.multicast_position = random_.around(header.multicast_position);
        break;
    }
    std::memcpy(at, &header, sizeof header);
  }

  void take_settled() {
    for (const auto& rank : ranks_) {
      for (const shm::Settlement& settlement : std::exchange(rank->context.settled, {})) {
        CHECK(!settlement.request->settled.exchange(true));  // once
        ++num_settled_;
        if (!settlement.failure) ++num_delivered_;
        if (settlement.failure) CHECK(!settlement.failure->message.empty());
      }
    }
  }

  Random random_;
  std::vector<shm::SegmentPtr> segments_;
  std::unique_ptr<Rank> ranks_[2];
  std::vector<Message> messages_;
  bool silent_ = false;
  int num_settled_ = 0;
  int num_delivered_ = 0;
};

TEST(a_peer_that_writes_what_it_likes) {
  const int num_rounds = check::rounds(3000);
  int num_found_out = 0, num_settled = 0, num_delivered = 0;
  for (int seed = 1; seed <= num_rounds; ++seed) {
    check::context = "seed " + std::to_string(seed);
    Round round(seed);
    num_found_out += round.run();
    num_settled += round.num_settled();
    num_delivered += round.num_delivered();
  }
  std::printf("%d rounds: %d peers found out, %d messages settled, %d of them delivered\n",
              num_rounds, num_found_out, num_settled, num_delivered);
  // The mutations are neither all harmless nor all refused at once, and messages get through.
  CHECK(num_found_out > num_rounds / 10 && num_found_out < num_rounds);
  CHECK(num_delivered > num_rounds);
}
