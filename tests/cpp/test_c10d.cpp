// The TCP transport with threads as ranks, over real sockets of this host.
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>

#include "host_exchanges.h"
#include "message/start_thread.h"

using namespace meeting;

TEST(random_programs) {
  for (int seed = 0; seed < check::rounds(40); ++seed) {
    check::context = "program " + std::to_string(seed);
    const Program program(seed, 5, 2, 1 << 20);
    Meeting meeting(program.size);
    meeting.over_tcp();
    run_ranks(meeting, [&](Communicator& comm) { play(program, comm); });
  }
}

TEST(large_messages_both_ways_between_all_pairs) {
  Meeting meeting(3);
  meeting.over_tcp();
  run_ranks(meeting, [](Communicator& comm) {
    for (int round = 0; round < 2; ++round) exchange_with_all(comm, 5 << 20, round, round % 2);
  });
}

// Ranks 0 and 3 of eight are no neighbours: both ends find out at once that they need each other.
// The watchdog may find room in a socket before anybody else does, also for the last bytes. Nothing
// that comes from the peer afterwards tells of them.
TEST(ticks_beside_large_messages) {
  constexpr int kNumRanks = 5;
  Meeting meeting(kNumRanks);
  meeting.over_tcp();
  std::barrier<> rounds(kNumRanks);
  const auto take_part = [&](int rank) {
    HostTransport* transport = nullptr;
    const auto comm = std::make_unique<Communicator>(
        CommunicatorOptions{.rank = rank, .size = kNumRanks, .timeout = kLimit},
        [&](TransportEvents& events) {
          auto made = meeting.transport(rank, events);
          transport = made.get();
          return made;
        });
    std::atomic<bool> is_over{false};
    std::thread ticks([&] {
      while (!is_over) transport->tick();
    });
    Bytes bytes = coded_bytes(1, 16 << 20);
    std::vector<PointToPoint> batch;
    for (int peer = 0; peer < kNumRanks; ++peer)
      if (peer != rank && (peer == 0 || rank == 0))
        batch.push_back({rank == 0 ? Direction::send : Direction::recv, peer, 0, tensor(bytes), 0});
    for (int round = 0; round < 12; ++round) {
      const FailurePtr failure =
          failure_of(*comm, [&] { return comm->batch_p2p(batch, {.is_async = round % 2 == 0}); });
      if (failure) check::fail(__FILE__, __LINE__, failure->message);
      rounds.arrive_and_wait();
    }
    is_over = true;
    ticks.join();
    comm->close(nullptr);
  };
  check::in_threads(kNumRanks, take_part);
}

TEST(both_ends_connect_at_once) {
  for (int round = 0; round < 20; ++round) {
    check::context = "both at once, round " + std::to_string(round);
    Meeting meeting(8);
    meeting.over_tcp();
    std::atomic<int> num_ready{0};
    run_ranks(meeting, [&](Communicator& comm) {
      ++num_ready;
      while (num_ready < 8) std::this_thread::yield();
      if (comm.rank() != 0 && comm.rank() != 3) return;
      Bytes mine = coded_bytes(uint64_t(comm.rank()), 40'000), other(40'000);
      const int peer = 3 - comm.rank();
      const PointToPoint batch[] = {{Direction::send, peer, 0, tensor(mine), 0},
                                    {Direction::recv, peer, 0, tensor(other), 0}};
      wait(comm, comm.batch_p2p(batch));
      CHECK(other == coded_bytes(uint64_t(peer), 40'000));
    });
  }
}

// Rank 0 of eight is a neighbour of all but ranks 3 and 5.
TEST(connections_ahead_of_messages) {
  Meeting meeting(8);
  meeting.over_tcp();
  std::atomic<int> num_waiting{7};
  run_ranks(meeting, [&](Communicator& comm) {
    if (comm.rank() == 0) {
      const int peers[] = {0, 1, 3, 5};
      comm.connect(peers);
      const auto until = std::chrono::steady_clock::now() + kLimit;
      for (int peer = 1; peer < 8; ++peer) {
        while (comm.describe_peer(peer) != "is connected" &&
               std::chrono::steady_clock::now() < until)
          std::this_thread::sleep_for(1ms);
        CHECK_EQ(comm.describe_peer(peer), "is connected");
      }
      num_waiting = 0;
    }
    while (num_waiting > 0) std::this_thread::yield();
  });
}

size_t num_entries(const char* folder) {
  size_t count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(folder)) ++count;
  return count;
}

TEST(threads_do_not_grow_with_the_group) {
  for (const int size : {2, 9}) {
    const size_t before = num_entries("/proc/self/task");
    Meeting meeting(size);
    meeting.over_tcp();
    std::vector<std::unique_ptr<Communicator>> comms;
    for (int rank = 0; rank < size; ++rank) comms.push_back(meeting.communicator(rank));
    std::vector<OperationPtr> barriers;
    for (const auto& comm : comms) barriers.push_back(comm->barrier());
    for (int rank = 0; rank < size; ++rank) wait(*comms[rank], barriers[rank]);
    CHECK_EQ(num_entries("/proc/self/task") - before, size_t(4 * size));
    check::in_threads(size, [&](int rank) { comms[rank]->close(nullptr); });
  }
}

// An address of another network, and one where a stranger listens, come before the right one.
TEST(addresses_that_lead_elsewhere) {
  Meeting meeting(2);
  meeting.over_tcp();
  for (Introduction& introduction : meeting.introductions)
    introduction.hosts = {"192.0.2.1", "no address", "127.0.0.1"};
  run_ranks(meeting, [&](Communicator& comm) { wait(comm, comm.barrier()); });
}

class Stranger {  // connects, and says what it likes
 public:
  explicit Stranger(uint16_t port) : fd_(::socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    CHECK_EQ(connect(fd_, reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
  }
  ~Stranger() { ::close(fd_); }
  void say(const void* data, size_t num_bytes) {
    CHECK_EQ(send(fd_, data, num_bytes, MSG_NOSIGNAL), static_cast<ssize_t>(num_bytes));
  }
  // As rank `from` of `meeting` would; `kind`: 1 hello, 2 welcome.
  void say_hello(const Meeting& meeting, uint32_t from, uint32_t to, uint16_t kind = 1) {
    struct {
      uint32_t magic = 0x31484350;
      uint16_t version = wire::kVersion;
      uint16_t kind;
      uint32_t from, to;
      tcp::Token token;
    } hello;
    hello.kind = kind;
    hello.from = from;
    hello.to = to;
    hello.token = meeting.token;
    say(&hello, sizeof hello);
  }
  bool hears_welcome() {
    std::byte answer[32];
    return recv(fd_, answer, sizeof answer, MSG_WAITALL) == sizeof answer;
  }
  void greet() {
    const Bytes packet = wire::PacketWriter().take(kEpoch, 1);
    say(packet.data(), packet.size());
  }

 private:
  const int fd_;
};

TEST(strangers_are_sent_away) {
  Meeting meeting(2), other(2);
  meeting.over_tcp();
  other.token[3] ^= std::byte{1};
  run_ranks(meeting, [&](Communicator& comm) {
    wait(comm, comm.barrier());
    const uint16_t port = meeting.introductions[comm.rank()].port;
    const auto rank = uint32_t(comm.rank());
    Stranger silent(port), half(port);
    half.say("PCH1", 4);
    Stranger noisy(port), wrong_token(port), wrong_rank(port), out_of_range(port), twice(port),
        wrong_kind(port);
    noisy.say("GET / HTTP/1.1\r\nHost: a-program-of-another-kind\r\n\r\n", 48);
    CHECK(!noisy.hears_welcome());
    wrong_token.say_hello(other, 1 - rank, rank);
    CHECK(!wrong_token.hears_welcome());
    wrong_rank.say_hello(meeting, 1 - rank, 1 - rank);
    CHECK(!wrong_rank.hears_welcome());
    out_of_range.say_hello(meeting, 2, rank);
    CHECK(!out_of_range.hears_welcome());
    twice.say_hello(meeting, 1 - rank, rank);  // that rank is connected
    CHECK(!twice.hears_welcome());
    wrong_kind.say_hello(meeting, 1 - rank, rank, 2);
    CHECK(!wrong_kind.hears_welcome());
    wait(comm, comm.barrier());
  });
}

// A peer that knows the secret, and then breaks the protocol or off.
TEST(a_peer_that_breaks) {
  const auto expect = [](const std::string& what, const std::function<void(Stranger&)>& act,
                         FailureKind kind, const std::string& text) {
    check::context = what;
    Meeting meeting(2);
    meeting.over_tcp();
    const uint16_t port = meeting.introductions[1].port;
    const auto comm = meeting.communicator(1);
    Bytes memory(100'000);
    const PointToPoint recv{Direction::recv, 0, 0, tensor(memory), 0};
    const OperationPtr operation = comm->batch_p2p({&recv, 1});
    auto peer = std::make_unique<Stranger>(port);
    peer->say_hello(meeting, 0, 1);
    // The lower rank's attempt counts, whatever this one tries meanwhile.
    CHECK(peer->hears_welcome());
    peer->greet();
    act(*peer);
    if (kind == FailureKind::peer_lost) peer.reset();
    const FailurePtr failure = failure_of(*comm, [&] { return operation; });
    says(failure, kind, text);
    comm->close(nullptr);
  };
  expect("breaks off", [](Stranger&) {}, FailureKind::peer_lost, "lost the connection to rank 0");
  expect(
      "breaks off in a header", [](Stranger& peer) { peer.say("PCX1", 4); }, FailureKind::peer_lost,
      "lost the connection to rank 0");
  expect(
      "nonsense", [](Stranger& peer) { peer.say(Bytes(64).data(), 64); }, FailureKind::error,
      "wrong magic number");
  expect(
      "a body that nobody has called for",
      [](Stranger& peer) {
        const wire::PieceHeader header{.channel = 0, .epoch = kEpoch, .num_bytes = 10, .seq = 0};
        peer.say(&header, sizeof header);
      },
      FailureKind::error, "sends a body that is not expected");
  expect(
      "a packet of another communicator",
      [](Stranger& peer) {
        wire::PacketWriter writer;
        writer.add(wire::Kind::closing, 0, 0, nullptr, {});
        const Bytes packet = writer.take(kEpoch + 1, 2);
        peer.say(packet.data(), packet.size());
      },
      FailureKind::error, "belongs to another communicator");
}

// In the middle of a body, and while messages wait for their turn.
TEST(aborts_reach_all_ranks) {
  Meeting meeting(4);
  meeting.over_tcp();
  std::atomic<int> num_ready{0};
  check::in_threads(4, [&](int rank) {
    const auto comm = meeting.communicator(rank);
    wait(*comm, comm->barrier());
    ++num_ready;
    while (num_ready < 4) std::this_thread::yield();
    Bytes mine(64 << 20), other(8);
    const int next = (rank + 1) % 4, previous = (rank + 3) % 4;
    const PointToPoint batch[] = {{Direction::send, next, 0, tensor(mine), 0},
                                  {Direction::recv, previous, 1, tensor(other), 0}};
    const FailurePtr failure = failure_of(*comm, [&] {
      const auto operation = comm->batch_p2p({batch, size_t{rank == 2 ? 1u : 2u}});
      if (rank == 2) comm->abort("enough");
      return operation;
    });
    says(failure, FailureKind::aborted, "enough");
    comm->close(nullptr);
  });
}

// A process that holds what this one has open at the time, as a worker of a DataLoader does.
class Child {
 public:
  Child() : pid_(fork()) {
    if (pid_ == 0) {
      pause();
      _exit(0);
    }
  }
  ~Child() { end(); }
  pid_t pid() const { return pid_; }
  void end() {
    if (pid_ <= 0) return;
    kill(pid_, SIGKILL);
    waitpid(std::exchange(pid_, 0), nullptr, 0);
  }

 private:
  pid_t pid_;
};

// Rank 1 knows where rank 0 listened, and comes when that one has closed; its child holds the port.
TEST(a_closed_peer_whose_child_lives) {
  Meeting meeting(2);
  meeting.over_tcp();
  const Child child;
  std::atomic<bool> looks{false}, closed{false};
  meeting.look_up = [&](int rank, int peer) -> std::optional<Introduction> {
    if (rank == 0) return std::nullopt;
    looks = true;
    while (!closed) std::this_thread::sleep_for(1ms);
    return meeting.introductions[peer];
  };
  const auto comm = meeting.communicator(1, 10s);
  while (!looks) std::this_thread::sleep_for(1ms);
  meeting.communicator(0)->close(nullptr);
  closed = true;
  Bytes memory(8);
  const PointToPoint recv{Direction::recv, 0, 0, tensor(memory), 0};
  const FailurePtr failure = failure_of(*comm, [&] { return comm->batch_p2p({&recv, 1}); });
  CHECK(failure && failure->kind == FailureKind::peer_lost);
  CHECK(failure && failure->message.find("has closed its communicator") != std::string::npos);
  CHECK(comm->failure() == nullptr);
  comm->close(nullptr);
}

// A rank aborts, and its process ends, while all threads of its peer that could hear of it are busy.
TEST(a_process_that_ends_after_an_abort) {
  Child process;
  Meeting meeting(2);
  meeting.over_tcp();
  meeting.introductions[1].pid = process.pid();
  const auto first = meeting.communicator(0), second = meeting.communicator(1);
  const OperationPtr barriers[] = {first->barrier(), second->barrier()};
  wait(*first, barriers[0]);
  wait(*second, barriers[1]);
  Bytes mine(8), other(8);
  const PointToPoint send{Direction::send, 0, 0, tensor(mine), 0};
  const PointToPoint recv{Direction::recv, 1, 0, tensor(other), 0};
  std::atomic<bool> is_busy{false};
  const auto keep_busy = [&is_busy, comm = first.get()] {
    is_busy = true;
    const auto until = std::chrono::steady_clock::now() + 20s;
    while (!comm->failure() && std::chrono::steady_clock::now() < until)
      std::this_thread::sleep_for(1ms);
  };
  const OperationPtr received = first->batch_p2p({&recv, 1}, {.on_success = keep_busy});
  wait(*second, second->batch_p2p({&send, 1}));
  while (!is_busy) std::this_thread::sleep_for(1ms);
  second->abort("enough");
  process.end();
  // A thread that waited for it would serve the connection.
  while (!first->failure() && !received->done()) std::this_thread::sleep_for(1ms);
  CHECK(first->failure() != nullptr);
  if (!first->failure()) return;
  CHECK(first->failure()->kind == FailureKind::aborted);
  CHECK_EQ(first->failure()->message,
           "communicator failed on rank 1: communicator aborted by rank 1: enough");
  for (const auto& comm : {first.get(), second.get()}) comm->close(nullptr);
}

// Rank 3 has no connection to rank 0 when that one closes.
TEST(a_peer_that_closed_before_they_met) {
  Meeting meeting(8);
  meeting.over_tcp();
  std::atomic<bool> closed{false};
  std::atomic<int> num_waiting{7};
  run_ranks(meeting, [&](Communicator& comm) {
    if (comm.rank() == 0) {
      comm.close(nullptr);
      closed = true;
      return;
    }
    while (!closed) std::this_thread::yield();
    if (comm.rank() == 3) {
      Bytes memory(8);
      const PointToPoint recv{Direction::recv, 0, 0, tensor(memory), 0};
      const FailurePtr failure = failure_of(comm, [&] { return comm.batch_p2p({&recv, 1}); });
      says(failure, FailureKind::peer_lost, "has closed its communicator");
      CHECK(comm.failure() == nullptr);
    }
    --num_waiting;
    while (num_waiting > 0) std::this_thread::yield();
  });
}

// Somebody takes the connection and says nothing: the error says so at the deadline.
TEST(a_peer_that_cannot_be_reached) {
  Meeting meeting(2);
  meeting.over_tcp();
  const auto comm = meeting.communicator(0, 500ms);
  Bytes memory(8);
  const PointToPoint send{Direction::send, 1, 0, tensor(memory), 0};
  const FailurePtr failure = failure_of(*comm, [&] { return comm->batch_p2p({&send, 1}); });
  says(failure, FailureKind::timeout, "rank 1 is not connected");
  comm->close(nullptr);
}

#ifdef PIPECOMM_FAULTS
TEST(no_thread_is_left) {
  for (const int failing : {1, 2, 3, 4}) {
    check::context = "no thread " + std::to_string(failing);
    Meeting meeting(2);
    meeting.over_tcp();
    failing_thread = failing;
    CHECK_THROWS(PipeCommException, "cannot start a thread", meeting.communicator(0));
    failing_thread = 0;
  }
}
#endif

TEST(interfaces) {
  for (const std::string& host : tcp::local_hosts("")) CHECK(!host.starts_with("127."));
  const std::vector<std::string> loopback = tcp::local_hosts("lo");
  CHECK(std::find(loopback.begin(), loopback.end(), "127.0.0.1") != loopback.end());
  CHECK_INVALID("the network interface nosuch0 does not exist here",
                tcp::local_hosts("lo,nosuch0"));
}
