#include "meeting.h"

#include <fcntl.h>
#include <unistd.h>

namespace meeting {

FailurePtr failure_of(Communicator& comm, const std::function<OperationPtr()>& post) {
  try {
    wait(comm, post());
  } catch (const PipeCommException& error) {
    return error.failure();
  }
  return nullptr;
}

bool says(const FailurePtr& failure, FailureKind kind, const std::string& text) {
  const bool is_it = failure && failure->kind == kind && check::contains(failure->message, text);
  if (!is_it)
    check::fail(__FILE__, __LINE__,
                "'" + text + "' is not in: " + (failure ? failure->message : "success"));
  return is_it;
}

Meeting::Meeting(int num_ranks) : size(num_ranks), introductions(num_ranks), farewells(num_ranks) {
  for (size_t byte = 0; byte < key.size(); ++byte) key[byte] = std::byte(byte + 1);
}

Meeting::~Meeting() {
  for (const Introduction& each : introductions)
    if (each.memory_fd >= 0) ::close(each.memory_fd);
}

Meeting& Meeting::over_tcp() {
  listeners.resize(size);
  for (int rank = 0; rank < size; ++rank) {
    listeners[rank] = tcp::listen_at({}, introductions[rank].port);
    introductions[rank].hosts = {"127.0.0.1"};
  }
  return *this;
}

Meeting& Meeting::over_memory(const shm::SegmentShape& shape) {
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

std::unique_ptr<HostTransport> Meeting::transport(int rank, TransportEvents& events) {
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

std::unique_ptr<Communicator> Meeting::communicator(int rank, std::chrono::nanoseconds timeout) {
  const CommunicatorOptions options{
      .rank = rank, .size = size, .num_channels = num_channels, .timeout = timeout};
  return std::make_unique<Communicator>(
      options, [&](TransportEvents& events) { return transport(rank, events); });
}

std::unique_ptr<HostTransport> over_same_memory(const std::vector<shm::SegmentPtr>& segments,
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

void run_ranks(int size, const std::function<std::unique_ptr<Communicator>(int rank)>& make,
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

}  // namespace meeting
