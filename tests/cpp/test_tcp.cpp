// The TCP transport with threads as ranks, over real sockets of this host.
#include "message/start_thread.h"
#include "stranger.h"

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

// The watchdog may find room in a socket before any other thread does, also for the last bytes. No
// later packet of the peer reports these.
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

// Ranks 0 and 3 of eight are not neighbours: both ends connect at the same time.
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

TEST(threads_do_not_grow_with_the_group) {
  std::thread([] {}).join();  // with the first one, ThreadSanitizer begins a thread of its own
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

// A rank that has closed answers all messages, but the peer does not read: at a limit it is lost.
TEST(a_peer_that_does_not_read) {
  int fds[2];
  CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, fds), 0);
  const tcp::Socket peer(fds[0]);
  tcp::Connection connection(1, 0, kEpoch, 1 << 20);
  connection.attach(tcp::Socket(fds[1]), false);
  connection.link().say_closing();
  const auto flood = [&] {
    for (uint64_t number = 1; number < 1000; ++number) {
      wire::PacketWriter writer;
      Descriptor descriptor;
      for (uint64_t seq = 200 * (number - 1); seq < 200 * number; ++seq)
        writer.add(wire::Kind::data, 0, seq, &descriptor, {});
      const Bytes packet = writer.take(kEpoch, number);
      size_t num_sent = 0;
      while (num_sent < packet.size()) {
        const ssize_t count =
            send(peer.fd(), packet.data() + num_sent, packet.size() - num_sent, MSG_NOSIGNAL);
        if (count > 0) num_sent += size_t(count);
        connection.read();
        connection.write();
      }
    }
  };
  CHECK_THROWS(std::runtime_error, "rank 0 sends, but does not read what is said to it", flood());
}

// Three addresses where connections are accepted, but not answered, come before the right one.
TEST(addresses_are_tried_side_by_side) {
  Meeting meeting(2);
  meeting.over_tcp();
  std::vector<tcp::Socket> silent;
  for (int rank : {0, 1}) {
    Introduction& introduction = meeting.introductions[rank];
    meeting.listeners[rank] = tcp::listen_at({"127.0.0.1"}, introduction.port);
    for (const int last_digit : {2, 3, 4}) {
      tcp::Socket& socket = silent.emplace_back(::socket(AF_INET, SOCK_STREAM, 0));
      const sockaddr_in address = loopback(introduction.port, uint8_t(last_digit));
      CHECK_EQ(bind(socket.fd(), reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
      CHECK_EQ(listen(socket.fd(), 16), 0);
    }
    introduction.hosts = {"127.0.0.2", "127.0.0.3", "127.0.0.4", "127.0.0.1"};
  }
  const auto begin = Clock::now();
  run_ranks(meeting, [&](Communicator& comm) { wait(comm, comm.barrier()); });
  CHECK(Clock::now() - begin < 5s);
}

TEST(listening_at_chosen_addresses) {
  uint16_t port = 0;
  const auto listeners = tcp::listen_at({"127.0.0.2", "127.0.0.3"}, port);
  CHECK_EQ(listeners.size(), 2u);
  std::vector<tcp::Socket> callers;
  for (const int last_digit : {1, 2, 3}) {
    const tcp::Socket& caller = callers.emplace_back(::socket(AF_INET, SOCK_STREAM, 0));
    const sockaddr_in address = loopback(port, uint8_t(last_digit));
    const int result =
        connect(caller.fd(), reinterpret_cast<const sockaddr*>(&address), sizeof address);
    if (last_digit != 1) CHECK_EQ(result, 0);  // another program may listen at the other one
  }
  for (const tcp::Socket& listener : listeners) {
    CHECK(tcp::accept_from(listener));
    CHECK(!tcp::accept_from(listener));
  }
}

// An address that two interfaces have, and one that this host does not have (any more).
TEST(listening_where_it_can) {
  uint16_t port = 0;
  CHECK_EQ(tcp::listen_at({"127.0.0.2", "127.0.0.2"}, port).size(), 1u);
  const auto listeners = tcp::listen_at({"203.0.113.7", "127.0.0.2", "203.0.113.8"}, port);
  CHECK_EQ(listeners.size(), 1u);
  CHECK_EQ(tcp::host_of(listeners[0]), "127.0.0.2");
  CHECK_THROWS(std::system_error, "203.0.113.7",
               tcp::listen_at({"203.0.113.7", "203.0.113.7"}, port));
  CHECK_THROWS(std::system_error, "203.0.113.8",
               tcp::listen_at({"203.0.113.7", "203.0.113.8"}, port));
}

// A peer that knows the secret, and then breaks the protocol or the connection.
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
    CHECK(peer->is_taken(meeting, 0, 1));
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

// Aborts in the middle of a body, and while messages wait for their turn.
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

// Rank 1 knows where rank 0 listened, and comes when that one has closed; its child holds the port.
// Between a failure and the end of the rank that reports it, no call may take the end for the cause.
TEST(a_peer_that_fails_and_closes_has_failed) {
  Meeting meeting(2);
  meeting.over_tcp();
  std::barrier<> both(2);
  check::in_threads(2, [&](int rank) {
    HostTransport* transport = nullptr;
    Communicator comm({.rank = rank, .size = 2, .timeout = kLimit}, [&](TransportEvents& events) {
      auto made = meeting.transport(rank, events);
      transport = made.get();
      return made;
    });
    wait(comm, comm.barrier());
    both.arrive_and_wait();
    if (rank == 1) {
      comm.abort("enough");
      comm.close(nullptr);
    } else {
      const auto until = std::chrono::steady_clock::now() + kLimit;
      while ((comm.describe_peer(1) != "has closed its communicator" || !comm.failure()) &&
             std::chrono::steady_clock::now() < until)
        std::this_thread::sleep_for(1ms);
      CHECK_EQ(comm.describe_peer(1), "has closed its communicator");
      CHECK(!transport->has_closed(1));
      CHECK_CONTAINS(comm.failure()->message, "enough");
      comm.close(nullptr);
    }
  });
}

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

// A rank aborts, and its process ends, while all threads of its peer that could read that are busy.
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
  const OperationPtr received = first->batch_p2p({&recv, 1});
  received->on_success(keep_busy);
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

// A rank's last message has come, but all threads that could read it are busy when its process ends.
TEST(a_process_that_ends_after_a_message) {
  Child process;
  Meeting meeting(2);
  meeting.over_tcp();
  meeting.introductions[1].pid = process.pid();
  const auto first = meeting.communicator(0, 20s), second = meeting.communicator(1, 20s);
  const OperationPtr barriers[] = {first->barrier(), second->barrier()};
  wait(*first, barriers[0]);
  wait(*second, barriers[1]);
  Bytes mine = coded_bytes(3, 8), other(8), last(8);
  const PointToPoint send{Direction::send, 0, 0, tensor(mine), 0};
  const PointToPoint recv{Direction::recv, 1, 0, tensor(other), 0};
  const PointToPoint recv_last{Direction::recv, 1, 0, tensor(last), 0};
  std::atomic<bool> is_busy{false}, is_over{false};
  const auto keep_busy = [&] {
    is_busy = true;
    while (!is_over) std::this_thread::sleep_for(1ms);
  };
  const OperationPtr received = first->batch_p2p({&recv, 1});
  received->on_success(keep_busy);
  const OperationPtr received_last = first->batch_p2p({&recv_last, 1});
  wait(*second, second->batch_p2p({&send, 1}));
  while (!is_busy) std::this_thread::sleep_for(1ms);
  const OperationPtr sent_last = second->batch_p2p({&send, 1});
  process.end();
  const auto until = Clock::now() + 20s;
  while (!first->failure() && Clock::now() < until) std::this_thread::sleep_for(1ms);
  is_over = true;
  CHECK(first->failure() && first->failure()->kind == FailureKind::peer_lost);
  CHECK(failure_of(*first, [&] { return received_last; }) == nullptr);
  CHECK(last == mine);
  // Rank 1, whose process is not really the one that ended, may have had no answer to its last message. Its
  // close() would raise the loss of rank 0 if it began before that.
  while (!second->failure() && Clock::now() < until) std::this_thread::sleep_for(1ms);
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

// Rank 1 has connected, and closes before it speaks; rank 0 looks it up for the first time meanwhile.
TEST(a_peer_that_closes_while_it_is_looked_up) {
  Meeting meeting(2);
  meeting.over_tcp();
  meeting.farewells[1] = "";
  std::atomic<bool> is_connected{false}, is_looked_up{false};
  meeting.look_up = [&](int, int peer) -> std::optional<Introduction> {
    if (!is_connected) return std::nullopt;
    is_looked_up = true;
    return meeting.introductions[peer];
  };
  const auto comm = meeting.communicator(0, 20s);
  Bytes memory(8);
  const PointToPoint recv{Direction::recv, 1, 0, tensor(memory), 0};
  const OperationPtr received = comm->batch_p2p({&recv, 1});
  {
    Stranger peer(meeting.introductions[0].port);
    CHECK(peer.is_taken(meeting, 1, 0));
    is_connected = true;
    while (!is_looked_up) std::this_thread::sleep_for(1ms);
    std::this_thread::sleep_for(50ms);  // what was found is known
  }
  says(failure_of(*comm, [&] { return received; }), FailureKind::peer_lost,
       "has closed its communicator");
  CHECK(comm->failure() == nullptr);
  comm->close(nullptr);
}

// A program accepts the connection and sends nothing: the error states that at the deadline.
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
