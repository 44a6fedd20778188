// Routes: pairs of ranks that use different transports, made on first use.
#include <unistd.h>

#include <future>

#include "host_exchanges.h"

using namespace meeting;

// Ranks with equal numbers are on one host: others see neither their memory nor their processes.
void place(Meeting& meeting, const std::vector<int>& hosts) {
  meeting.look_up = [&meeting, hosts](int rank, int peer) -> std::optional<Introduction> {
    Introduction introduction = meeting.introductions[peer];
    if (hosts[rank] != hosts[peer]) {
      introduction.pid = 0;
      introduction.memory_fd = -1;
      introduction.reason = "another host";
    }
    return introduction;
  };
}

constexpr int64_t kNumBytes[] = {100, 40'000, 1'000'001};  // small and large, before and after
// their routes are made

void broadcast_from_all(Communicator& comm, size_t num_bytes) {
  for (int source = 0; source < comm.size(); ++source) {
    Bytes bytes = comm.rank() == source ? coded_bytes(source, num_bytes) : Bytes(num_bytes);
    wait(comm, comm.broadcast(tensor(bytes), source));
    CHECK(bytes == coded_bytes(source, num_bytes));
  }
}

TEST(pairs_take_the_way_that_they_have) {
  for (const auto& hosts : std::vector<std::vector<int>>{
           {0, 0}, {0, 1}, {0, 0, 1, 1}, {0, 1, 0, 1, 2}, {0, 0, 0, 1, 1, 1, 2, 2, 2, 2}}) {
    const int size = int(hosts.size());
    check::context = "mixed " + std::to_string(size);
    Meeting meeting(size);
    meeting.over_tcp().over_memory(shape_of(size, 8 << 20));
    place(meeting, hosts);
    run_ranks(meeting, [&](Communicator& comm) {
      for (int round = 0; round < 6; ++round)
        exchange_with_all(comm, kNumBytes[round % 3], round, round % 2);
      for (const size_t num_bytes : {100u, 300'000u}) broadcast_from_all(comm, num_bytes);
      all_to_all(comm, {5 * size, 5 * size}, 0, 1);
      wait(comm, comm.barrier());
      for (int peer = 0; peer < size; ++peer)
        if (peer != comm.rank())
          CHECK_EQ(comm.transport().route(peer).transport,
                   hosts[peer] == hosts[comm.rank()] ? "shm" : "tcp");
    });
  }
}

__attribute__((no_sanitize("thread")))  // another thread is writing it
bool is_written(const volatile std::byte& byte) {
  return byte != std::byte{0};
}

// Once an operation has failed, its tensors may be used for something else: no thread may still unpack a
// message.
TEST(a_failure_while_a_message_is_unpacked) {
  constexpr int64_t kRows = 4 << 20, kRunBytes = 8;
  Meeting meeting(2);
  meeting.over_tcp().over_memory(shape_of(2));
  place(meeting, {0, 1});
  run_ranks(meeting, [](Communicator& comm) {
    const Sizes halves{kRows, kRows}, runs{kRunBytes, kRunBytes};
    const Dims in{2 * kRows, kRunBytes}, out{kRows, 2 * kRunBytes};
    const std::vector<AllToAllTensor> whole(1, {{in, kByte}, halves, runs});
    const auto plan =
        std::make_shared<PreparedExchange>(all_to_all_plan({comm.rank(), 2}, whole, 0, 1));
    Bytes input(2 * kRows * kRunBytes, std::byte{1}), output(input.size());
    const TensorRef from{input.data(), kByte, in, {kRunBytes, 1}, nullptr};
    const TensorRef to{output.data(), kByte, out, {2 * kRunBytes, 1}, nullptr};
    try {
      const OperationPtr operation =
          comm.exchange(OpCode::all_to_all, plan, {&from, 1}, {&to, 1}, {.is_async = true});
      if (comm.rank() == 0) {
        while (!is_written(output[kRunBytes])) std::this_thread::yield();
        comm.abort("enough");
      }
      wait(comm, operation);
    } catch (const PipeCommException& error) {
      CHECK(error.failure()->message.find("enough") != std::string::npos);
    }
    const Bytes before = output;
    std::this_thread::sleep_for(100ms);
    CHECK(output == before);
  });
}

// One end cannot use the memory of the other, which the other does not know.
TEST(one_end_without_memory) {
  for (const bool cannot_map : {false, true}) {
    check::context = cannot_map ? "cannot map" : "does not want to";
    Meeting meeting(2);
    meeting.over_tcp().over_memory(shape_of(2));
    meeting.look_up = [&](int rank, int peer) -> std::optional<Introduction> {
      Introduction introduction = meeting.introductions[peer];
      if (rank == 1) introduction.memory_fd = cannot_map ? 0 : -1;
      if (rank == 1) introduction.reason = "too little memory";
      return introduction;
    };
    run_ranks(meeting, [&](Communicator& comm) {
      for (int round = 0; round < 3; ++round)
        exchange_with_all(comm, kNumBytes[round], round, round % 2);
      const Route route = comm.transport().route(1 - comm.rank());
      CHECK_EQ(route.transport, "tcp");
      if (comm.rank() == 1)
        CHECK(route.reason.find(cannot_map ? "the shared memory of rank 0" : "too little memory") !=
              std::string::npos);
    });
  }
}

// Without TCP there is no alternative: the pair fails, and so does the communicator.
TEST(only_memory_and_none) {
  Meeting meeting(4);
  meeting.over_memory(shape_of(4));
  place(meeting, {0, 0, 0, 1});
  run_ranks(meeting, [&](Communicator& comm) {
    const FailurePtr failure = failure_of(comm, [&] { return comm.barrier(); });
    says(failure, FailureKind::mismatch,
         "transport=\"shm\" is not possible: another host; use \"auto\" or \"tcp\"");
  });
}

// A rank checks for a failure just before its communicator fails, and posts an operation after.
TEST(posting_after_a_refusal) {
  struct Events : TransportEvents {
    void on_peer_lost(int, const std::string& why) override {
      check::fail(__FILE__, __LINE__, why);
    }
    void on_remote_failure(const Failure&) override {}
    void on_broken(const std::string& why) override { check::fail(__FILE__, __LINE__, why); }
    void on_refused(int, const std::string& why) override {
      (*transport.get_future().get()).abort({.message = why});
    }
    std::promise<HostTransport*> transport;
  } events;
  Meeting meeting(2);
  meeting.over_memory(shape_of(2));
  place(meeting, {0, 1});
  const auto transport = meeting.transport(0, events);
  events.transport.set_value(transport.get());
  while (transport->describe_peer(1) != "has closed its communicator")
    std::this_thread::sleep_for(1ms);
  const RequestPtr request = make_request(Direction::recv, 1, {}, nullptr);
  transport->post({&request, 1}, true);
  CHECK(!request->settled);  // its operation has a better reason to fail
}

// Rank 1 makes its communicator later than rank 0, whose messages wait.
TEST(a_rank_that_comes_later) {
  for (const bool over_memory : {false, true}) {
    check::context = over_memory ? "later, memory" : "later, tcp";
    Meeting meeting(3);
    if (over_memory) meeting.over_memory(shape_of(3));
    meeting.over_tcp();
    std::atomic<bool> is_there{false};
    meeting.look_up = [&](int, int peer) -> std::optional<Introduction> {
      if (peer == 1 && !is_there) return std::nullopt;
      return meeting.introductions[peer];
    };
    const auto first = meeting.communicator(0);
    Bytes one = coded_bytes(1, 50'000), two = coded_bytes(2, 10), answer(10);
    const PointToPoint batch[] = {{Direction::send, 1, 0, tensor(one), 0},
                                  {Direction::send, 1, 0, tensor(two), 0},
                                  {Direction::recv, 1, 1, tensor(answer), 0}};
    const OperationPtr operation = first->batch_p2p(batch);
    CHECK(!first->wait(*operation, Clock::now() + 50ms, nullptr));
    CHECK_EQ(first->describe_peer(1), "has not made its communicator");
    is_there = true;
    std::thread later([&] {
      const auto second = meeting.communicator(1);
      Bytes large(50'000), small(10);
      const PointToPoint other[] = {{Direction::recv, 0, 0, tensor(large), 0},
                                    {Direction::recv, 0, 0, tensor(small), 0},
                                    {Direction::send, 0, 1, tensor(two), 0}};
      wait(*second, second->batch_p2p(other));
      CHECK(large == one && small == two);
      second->close(nullptr);
    });
    wait(*first, operation);
    CHECK(answer == two);
    later.join();
    first->close(nullptr);
  }
}

// The store does not answer, or the rank never comes: the operation reports that at its deadline.
TEST(a_rank_that_never_comes) {
  for (const bool throws : {false, true}) {
    check::context = throws ? "no store" : "never";
    Meeting meeting(2);
    meeting.over_tcp().over_memory(shape_of(2));
    meeting.look_up = [&](int, int) -> std::optional<Introduction> {
      if (throws) throw std::runtime_error("the store is gone");
      return std::nullopt;
    };
    const auto comm = meeting.communicator(0, 300ms);
    Bytes bytes(8);
    says(failure_of(*comm, [&] { return post(*comm, Direction::recv, 1, bytes); }),
         FailureKind::timeout,
         throws
             ? "rank 1 has not made its communicator, as far as this rank knows: the store is gone"
             : "rank 1 has not made its communicator; check");
    comm->close(nullptr);
  }
}

// All of eight ranks learn that rank 5 refuses, even those that do not need it.
TEST(a_rank_that_refuses) {
  Meeting meeting(8);
  meeting.over_tcp();
  meeting.look_up = [&](int, int peer) -> std::optional<Introduction> {
    Introduction introduction = meeting.introductions[peer];
    if (peer == 5) introduction.refusal = "Communicator was refused by rank 5: no reason";
    return introduction;
  };
  check::in_threads(8, [&](int rank) {
    if (rank == 5) return;
    const auto comm = meeting.communicator(rank);
    says(failure_of(*comm, [&] { return comm->barrier(); }), FailureKind::mismatch,
         "Communicator was refused by rank 5: no reason");
    comm->close(nullptr);
  });
}

// Rank 0 has gone before rank 1 looks for it: messages of rank 1 fail, its communicator does not.
TEST(a_rank_that_has_left) {
  for (const bool tcp : {false, true}) {
    check::context = tcp ? "left, both" : "left, memory";
    Meeting meeting(2);
    meeting.over_memory(shape_of(2));
    if (tcp) meeting.over_tcp();
    meeting.communicator(0)->close(nullptr);
    const auto comm = meeting.communicator(1);
    Bytes bytes(8);
    for (const Direction direction : {Direction::recv, Direction::send})
      says(failure_of(*comm, [&] { return post(*comm, direction, 0, bytes); }),
           FailureKind::peer_lost, "has closed its communicator");
    CHECK(comm->failure() == nullptr);
    comm->close(nullptr);
  }
}

void over(Meeting& meeting, const std::string& ways) {
  if (ways != "tcp") meeting.over_memory(shape_of(meeting.size));
  if (ways != "memory") meeting.over_tcp();
}

// Rank 0 fails and goes before rank 1 looks for it, or after: rank 1 gets the cause all the same.
TEST(a_rank_that_has_failed) {
  for (const std::string ways : {"memory", "tcp", "both"}) {
    for (const bool looks_before : {false, true}) {
      check::context = "failed, " + ways + (looks_before ? ", looked up before" : "");
      Meeting meeting(2);
      over(meeting, ways);
      std::promise<void> looks;
      std::atomic<bool> has_looked{false}, is_gone{false};
      meeting.look_up = [&](int rank, int peer) -> std::optional<Introduction> {
        if (rank == 0) return std::nullopt;
        if (!has_looked.exchange(true)) looks.set_value();
        while (looks_before && !is_gone) std::this_thread::sleep_for(1ms);
        return meeting.introductions[peer];
      };
      std::unique_ptr<Communicator> comm;
      auto first = meeting.communicator(0, 50ms);
      if (looks_before) {
        comm = meeting.communicator(1);
        looks.get_future().wait();  // it has the record of rank 0, and has not used it yet
      }
      says(failure_of(*first, [&] { return first->barrier(); }), FailureKind::timeout,
           "rank 1 has not made its communicator");
      first->close(nullptr);
      is_gone = true;
      if (!comm) comm = meeting.communicator(1);
      Bytes bytes(8);
      const FailurePtr failure =
          failure_of(*comm, [&] { return post(*comm, Direction::recv, 0, bytes); });
      says(failure, FailureKind::timeout, "communicator failed on rank 0: barrier timed out after");
      CHECK(failure && failure->origin_rank == 0);
      comm->close(nullptr);
    }
  }
}

// Rank 0 has left no farewell when rank 1 looks for it: it has died, and must not count as closed.
TEST(a_rank_that_has_died) {
  for (const std::string ways : {"memory", "tcp", "both"}) {
    check::context = "died, " + ways;
    Meeting meeting(2);
    over(meeting, ways);
    if (ways != "tcp") ::close(std::exchange(meeting.introductions[0].memory_fd, 1'000'000));
    if (ways != "memory") meeting.listeners[0].clear();
    const auto comm = meeting.communicator(1);
    Bytes bytes(8);
    says(failure_of(*comm, [&] { return post(*comm, Direction::recv, 0, bytes); }),
         FailureKind::peer_lost, "lost the connection to rank 0, which died or was cut off (");
    CHECK(comm->failure() != nullptr);
    comm->close(nullptr);
    meeting.introductions[0].memory_fd = -1;
  }
}

// Rank 0 closes while it connects to rank 1, which has read the farewell and rejects it: no loss.
TEST(a_rank_that_is_turned_away_as_it_closes) {
  for (int round = 0; round < check::rounds(20); ++round) {
    Meeting meeting(2);
    meeting.over_tcp();
    std::promise<void> is_out;
    meeting.on_farewell = [&](int rank) {
      if (rank != 0) return;
      is_out.set_value();
      std::this_thread::sleep_for(50ms);  // as a slow store
    };
    const auto first = meeting.communicator(0);
    std::this_thread::sleep_for(10ms);
    std::thread closes([&] { first->close(nullptr); });
    is_out.get_future().wait();
    const auto second = meeting.communicator(1);
    Bytes bytes(8);
    says(failure_of(*second, [&] { return post(*second, Direction::recv, 0, bytes); }),
         FailureKind::peer_lost, "has closed its communicator");
    closes.join();
    CHECK(first->failure() == nullptr);
    CHECK(second->failure() == nullptr);
    second->close(nullptr);
  }
}

// A store that answers neither a look-up nor a farewell holds up close() once, not twice.
TEST(a_close_while_a_look_up_hangs) {
  Meeting meeting(2);
  meeting.over_tcp();
  std::promise<void> looks, is_said;
  const std::shared_future<void> farewell = is_said.get_future().share();
  std::atomic<int> num_looks{0};
  std::atomic<bool> hung_for_nothing{false};
  meeting.look_up = [&](int, int) -> std::optional<Introduction> {
    if (num_looks++ == 0) looks.set_value();
    hung_for_nothing = farewell.wait_for(20s) != std::future_status::ready;
    return std::nullopt;
  };
  meeting.on_farewell = [&](int) {
    is_said.set_value();
    std::this_thread::sleep_for(50ms);
  };
  const auto comm = meeting.communicator(0);
  looks.get_future().wait();
  comm->close(nullptr);
  CHECK_EQ(num_looks.load(), 1);
  CHECK(!hung_for_nothing);
}

// Ranks post and close immediately, while their routes are being made: matched messages arrive.
TEST(closing_while_routes_are_made) {
  for (int round = 0; round < check::rounds(40); ++round) {
    check::context = "closing " + std::to_string(round);
    Meeting meeting(3);
    meeting.over_tcp().over_memory(shape_of(3));
    place(meeting, {0, 0, round % 2});
    std::vector<Bytes> received(3, Bytes(100));
    run_ranks(meeting, [&](Communicator& comm) {
      Bytes mine = coded_bytes(comm.rank(), 100);
      const int next = (comm.rank() + 1) % 3, previous = (comm.rank() + 2) % 3;
      post(comm, Direction::recv, previous, received[comm.rank()]);
      post(comm, Direction::send, next, mine);
      comm.close(nullptr);
    });
    for (int rank = 0; rank < 3; ++rank) CHECK(received[rank] == coded_bytes((rank + 2) % 3, 100));
  }
}

// Messages that wait for a route are dropped with the communicator that fails.
TEST(aborting_while_routes_are_made) {
  Meeting meeting(2);
  meeting.over_tcp().over_memory(shape_of(2));
  meeting.look_up = [](int, int) { return std::nullopt; };
  const auto comm = meeting.communicator(0);
  auto storage = std::make_shared<Bytes>(1000);
  const std::weak_ptr<Bytes> alive = storage;
  TensorRef lent = tensor(*storage);
  lent.storage = std::move(storage);
  const PointToPoint send{Direction::send, 1, 0, lent, 0};
  OperationPtr operation = comm->batch_p2p({&send, 1});
  lent.storage.reset();
  comm->abort("enough");
  says(failure_of(*comm, [&] { return operation; }), FailureKind::aborted, "enough");
  operation.reset();
  comm->close(nullptr);
}

// ------------------------------------------------------------------------------------------------
// recorded states

// "wanted mapped settling shm": the states of a connection, oldest first.
std::string states_of(const Communicator& comm, const std::string& connection, int peer) {
  std::string states;
  for (const ConnectionEvent& event : comm.connections())
    if (event.connection == connection && event.peer == peer)
      states += (states.empty() ? "" : " ") + event.state;
  return states;
}

ConnectionEvent latest(const Communicator& comm, const std::string& connection, int peer) {
  ConnectionEvent found;
  for (const ConnectionEvent& event : comm.connections())
    if (event.connection == connection && event.peer == peer) found = event;
  return found;
}

void await_state(const Communicator& comm, const std::string& connection, int peer,
                 const std::string& state) {
  const auto until = Clock::now() + kLimit;
  while (latest(comm, connection, peer).state != state && Clock::now() < until)
    std::this_thread::sleep_for(1ms);
  CHECK_EQ(latest(comm, connection, peer).state, state);
}

TEST(the_states_of_pairs_that_meet) {
  Meeting meeting(3);
  meeting.over_tcp().over_memory(shape_of(3));
  place(meeting, {0, 0, 1});
  std::barrier<> all_have_looked(3);
  run_ranks(meeting, [&](Communicator& comm) {
    wait(comm, comm.barrier());
    for (int peer = 0; peer < 3; ++peer) {
      if (peer == comm.rank()) continue;
      const bool is_shm = comm.rank() + peer == 1;
      await_state(comm, "route", peer, is_shm ? "shm" : "tcp");
      const std::string states = states_of(comm, "route", peer);
      CHECK(states.starts_with("wanted ") || states.starts_with("met ") ||
            states.starts_with("settling "));
      CHECK(states.ends_with(is_shm ? " settling shm" : " settling tcp"));
      CHECK_EQ(latest(comm, "route", peer).peer_now, "is connected");
      if (!is_shm) CHECK(states_of(comm, "tcp", peer).ends_with("attached connected"));
    }
    all_have_looked.arrive_and_wait();
  });
}

TEST(the_state_of_a_rank_that_never_comes) {
  for (const std::string ways : {"memory", "tcp", "both"}) {
    check::context = "never, " + ways;
    Meeting meeting(2);
    over(meeting, ways);
    meeting.look_up = [](int, int) { return std::nullopt; };
    const auto comm = meeting.communicator(0);
    const OperationPtr barrier = comm->barrier();
    const std::string connection = ways == "tcp" ? "tcp" : "route";
    await_state(*comm, connection, 1, "wanted");
    while (comm->describe_peer(1) != "has not made its communicator")
      std::this_thread::sleep_for(1ms);
    CHECK_EQ(latest(*comm, connection, 1).peer_now, "has not made its communicator");
    comm->abort("enough");
    CHECK_CONTAINS(latest(*comm, "communicator", -1).detail, "enough");
    comm->close(nullptr);
    CHECK_EQ(states_of(*comm, "communicator", -1), "failed closing closed");
  }
}

// Rank 1 connects while rank 0 cannot read its record: what rank 0 says of it follows the connection.
TEST(the_state_of_a_rank_that_connects_before_it_is_found) {
  for (const bool over_memory : {false, true}) {
    check::context = over_memory ? "not found, memory" : "not found, tcp";
    Meeting meeting(2);
    if (over_memory) meeting.over_memory(shape_of(2));
    meeting.over_tcp();
    place(meeting, {0, 1});
    std::atomic<int> num_look_ups{0};
    meeting.look_up = [&, others = meeting.look_up](int rank, int peer) {
      if (rank == 1) return others(rank, peer);
      ++num_look_ups;
      return std::optional<Introduction>();
    };
    std::barrier<> both_have_looked(2);
    run_ranks(meeting, [&](Communicator& comm) {
      wait(comm, comm.barrier());
      for (int before = num_look_ups; num_look_ups < before + 2;) std::this_thread::sleep_for(1ms);
      CHECK_EQ(comm.describe_peer(1 - comm.rank()), "is connected");
      both_have_looked.arrive_and_wait();
    });
  }
}

// Rank 1 listens but answers no attempt, as a process that is stopped; later it ends.
TEST(the_state_of_a_handshake_that_is_stuck) {
  Meeting meeting(2);
  meeting.over_tcp();
  const auto comm = meeting.communicator(0);
  const OperationPtr barrier = comm->barrier();
  await_state(*comm, "tcp", 1, "connecting");
  CHECK_CONTAINS(latest(*comm, "tcp", 1).detail,
                 "127.0.0.1 port " + std::to_string(meeting.introductions[1].port));
  meeting.listeners[1].clear();
  await_state(*comm, "tcp", 1, "lost");
  CHECK(states_of(*comm, "tcp", 1).starts_with("wanted connecting"));
  CHECK(states_of(*comm, "tcp", 1).ends_with("missed lost"));
  CHECK_CONTAINS(latest(*comm, "tcp", 1).detail, "nobody listens at 127.0.0.1");
  comm->close(nullptr);
}

TEST(the_states_of_refusals_and_of_ends) {
  {
    Meeting meeting(2);
    meeting.over_memory(shape_of(2));
    place(meeting, {0, 1});
    const auto comm = meeting.communicator(0);
    await_state(*comm, "route", 1, "gone");
    CHECK_EQ(states_of(*comm, "route", 1), "wanted refused settling gone");
    CHECK_EQ(latest(*comm, "route", 1).detail, "another host");
    comm->close(nullptr);
  }
  Meeting meeting(2);
  meeting.over_tcp();
  run_ranks(meeting, [&](Communicator& comm) {
    wait(comm, comm.barrier());
    if (comm.rank() == 1) return;
    await_state(comm, "tcp", 1, "closed");
    CHECK(check::contains(states_of(comm, "tcp", 1), "attached connected "));
    CHECK_EQ(latest(comm, "tcp", 1).detail, "the connection was closed");
  });
}
