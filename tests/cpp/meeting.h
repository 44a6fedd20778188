// Ranks of a group as threads of this process that communicate as processes do: over shared memory,
// real sockets of this host, or both.
#pragma once

#include "check.h"
#include "engine/communicator.h"
#include "routes/routed_transport.h"

namespace meeting {

inline constexpr auto kLimit = 60s;
inline constexpr uint32_t kEpoch = 7;
inline constexpr DType kByte{0, 1};

using Bytes = std::vector<std::byte>;

inline TensorRef tensor(Bytes& bytes) {
  return {bytes.data(), kByte, {std::ssize(bytes)}, {1}, nullptr};
}

inline std::byte coded(uint64_t key, size_t position) {
  uint64_t hash = key * 0x9e3779b97f4a7c15u + position * 0xbf58476d1ce4e5b9u;
  hash ^= hash >> 31;
  return static_cast<std::byte>(hash * 0x94d049bb133111ebu >> 56);
}
inline Bytes coded_bytes(uint64_t key, size_t num_bytes) {
  Bytes bytes(num_bytes);
  for (size_t idx = 0; idx < num_bytes; ++idx) bytes[idx] = coded(key, idx);
  return bytes;
}

inline void wait(Communicator& comm, const OperationPtr& operation) {
  comm.wait(*operation, Deadline::max(), nullptr);
}

// Posts one message.
inline OperationPtr post(Communicator& comm, Direction direction, int peer, Bytes& bytes,
                         int channel = 0) {
  const PointToPoint op{direction, peer, channel, tensor(bytes)};
  return comm.batch_p2p({&op, 1});
}

// The failure of an operation that `post` posts, at the call or later; null: it succeeds.
FailurePtr failure_of(Communicator& comm, const std::function<OperationPtr()>& post);

bool says(const FailurePtr& failure, FailureKind kind, const std::string& text);

inline shm::SegmentShape shape_of(int size, int64_t window_bytes = 0, int num_channels = 2,
                                  int64_t ring_bytes = 64 << 10) {
  return {.size = size,
          .num_channels = num_channels,
          .ring_bytes = ring_bytes,
          .window_bytes = window_bytes,
          .epoch = kEpoch};
}

// The ranks' records of each other before they meet. Tests may change them.
struct Meeting {
  explicit Meeting(int num_ranks);
  ~Meeting();
  Meeting(const Meeting&) = delete;
  Meeting& operator=(const Meeting&) = delete;

  Meeting& over_tcp();
  Meeting& over_memory(const shm::SegmentShape& shape);

  std::unique_ptr<HostTransport> transport(int rank, TransportEvents& events);
  std::unique_ptr<Communicator> communicator(int rank, std::chrono::nanoseconds timeout = kLimit);

  const int size;
  int num_channels = 2;
  tcp::Key key;
  tcp::ConnectorLimits limits;
  std::vector<std::vector<tcp::Socket>> listeners;  // by rank
  std::vector<shm::SegmentPtr> segments;
  std::vector<Introduction> introductions;
  std::mutex mutex;  // guards the line below
  std::vector<std::optional<std::string>> farewells;
  std::function<void(int rank)> on_farewell = [](int) {};
  std::function<std::optional<Introduction>(int rank, int peer)> look_up = [this](int, int peer) {
    return introductions[peer];
  };
};

// Shared memory alone, where the ranks map the very same segments: the sanitizers then see both ends
// of every word.
std::unique_ptr<HostTransport> over_same_memory(const std::vector<shm::SegmentPtr>& segments,
                                                int rank, TransportEvents& events);

// Runs `body` on a thread and a communicator per rank; an exception is a failed check.
void run_ranks(int size, const std::function<std::unique_ptr<Communicator>(int rank)>& make,
               const std::function<void(Communicator&)>& body);
inline void run_ranks(Meeting& meeting, const std::function<void(Communicator&)>& body,
                      std::chrono::nanoseconds timeout = kLimit) {
  run_ranks(meeting.size, [&](int rank) { return meeting.communicator(rank, timeout); }, body);
}

// Ranks over the same memory.
struct SameMemory {
  explicit SameMemory(const shm::SegmentShape& its_shape) : shape(its_shape) {
    for (int rank = 0; rank < shape.size; ++rank)
      segments.push_back(shm::Segment::create(rank, shape));
  }
  std::unique_ptr<Communicator> communicator(int rank) const {
    const CommunicatorOptions options{
        .rank = rank, .size = shape.size, .num_channels = shape.num_channels, .timeout = kLimit};
    return std::make_unique<Communicator>(
        options, [&](TransportEvents& events) { return over_same_memory(segments, rank, events); });
  }

  shm::SegmentShape shape;
  std::vector<shm::SegmentPtr> segments;
};
inline void run_ranks(const shm::SegmentShape& shape,
                      const std::function<void(Communicator&)>& body) {
  const SameMemory memory(shape);
  run_ranks(shape.size, [&](int rank) { return memory.communicator(rank); }, body);
}

}  // namespace meeting
