// Ranks of a group as threads of this process that communicate as processes do: over shared memory,
// real sockets of this host, or both.
#pragma once

#include <fcntl.h>
#include <unistd.h>

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

// The failure of an operation that `post` posts, at the call or later; null: it succeeds.
inline FailurePtr failure_of(Communicator& comm, const std::function<OperationPtr()>& post) {
  try {
    wait(comm, post());
  } catch (const PipeCommException& error) {
    return error.failure();
  }
  return nullptr;
}

inline bool says(const FailurePtr& failure, FailureKind kind, const std::string& text) {
  const bool is_it = failure && failure->kind == kind && check::contains(failure->message, text);
  if (!is_it)
    check::fail(__FILE__, __LINE__,
                "'" + text + "' is not in: " + (failure ? failure->message : "success"));
  return is_it;
}

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
  explicit Meeting(int num_ranks)
      : size(num_ranks), introductions(num_ranks), farewells(num_ranks) {
    for (size_t byte = 0; byte < key.size(); ++byte) key[byte] = std::byte(byte + 1);
  }
  ~Meeting() {
    for (const Introduction& each : introductions)
      if (each.memory_fd >= 0) ::close(each.memory_fd);
  }
  Meeting(const Meeting&) = delete;
  Meeting& operator=(const Meeting&) = delete;

  Meeting& over_tcp() {
    listeners.resize(size);
    for (int rank = 0; rank < size; ++rank) {
      listeners[rank] = tcp::listen_at({}, introductions[rank].port);
      introductions[rank].hosts = {"127.0.0.1"};
    }
    return *this;
  }
  Meeting& over_memory(const shm::SegmentShape& shape) {
    num_channels = shape.num_channels;
    for (int rank = 0; rank < size; ++rank) {
      segments.push_back(shm::Segment::create(rank, shape));
      Introduction& introduction = introductions[rank];
      introduction.pid = getpid();
      // A descriptor of our own: its number stays what it is when the rank closes.
      introduction.memory_fd = fcntl(segments[rank]->fd(), F_DUPFD_CLOEXEC, 0);
      introduction.memory_inode = segments[rank]->inode();
      introduction.window_bytes = shape.window_bytes;
    }
    return *this;
  }

  std::unique_ptr<HostTransport> transport(int rank, TransportEvents& events) {
    RoutedOptions options;
    options.rank = options.tcp.rank = rank;
    options.size = options.tcp.size = options.num_local_ranks = size;
    options.tcp.epoch = kEpoch;
    options.tcp.key = key;
    options.tcp.limits = limits;
    options.lookup = [this, rank](int peer) {
      std::optional<std::string> farewell;
      {
        std::lock_guard lock(mutex);
        farewell = farewells[peer];
      }
      std::optional<Introduction> introduction = look_up(rank, peer);
      if (introduction) introduction->farewell = farewell;
      return introduction;
    };
    options.say_farewell = [this, rank](const std::string& farewell) {
      {
        std::lock_guard lock(mutex);
        farewells[rank] = farewell;
      }
      on_farewell(rank);
    };
    if (!listeners.empty()) options.listeners = std::move(listeners[rank]);
    if (!segments.empty()) options.memory = segments[rank];
    return std::make_unique<RoutedTransport>(std::move(options), events);
  }
  std::unique_ptr<Communicator> communicator(int rank, std::chrono::nanoseconds timeout = kLimit) {
    const CommunicatorOptions options{
        .rank = rank, .size = size, .num_channels = num_channels, .timeout = timeout};
    return std::make_unique<Communicator>(
        options, [&](TransportEvents& events) { return transport(rank, events); });
  }

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
inline std::unique_ptr<HostTransport> over_same_memory(const std::vector<shm::SegmentPtr>& segments,
                                                       int rank, TransportEvents& events) {
  auto transport = std::make_unique<shm::ShmTransport>(
      segments[rank],
      shm::ShmOptions{.cores = std::make_shared<SharedCores>(static_cast<int>(segments.size()))},
      events);
  for (const shm::SegmentPtr& segment : segments) {
    if (segment->rank() == rank) continue;
    transport->add_peer(segment, nullptr);
    transport->note_routed(segment->rank());
  }
  transport->note_all_added();
  return transport;
}

// Runs `body` on a thread and a communicator per rank; an exception is a failed check.
inline void run_ranks(int size, const std::function<std::unique_ptr<Communicator>(int rank)>& make,
                      const std::function<void(Communicator&)>& body) {
  check::in_threads(size, [&](int rank) {
    const auto comm = make(rank);
    try {
      body(*comm);
      comm->close(nullptr);
    } catch (const std::exception& error) {
      check::fail(__FILE__, __LINE__, error.what());
      comm->abort(error.what());
    }
  });
}
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
