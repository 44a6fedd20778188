// Routes: pairs of ranks that reach each other in different ways, made when they are used.
#include <atomic>
#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "meeting.h"
#include "plan/builders.h"
#include "world.h"

namespace {

using namespace pipecomm;
using namespace std::chrono_literals;
using meeting::kEpoch;
using meeting::Meeting;
using meeting::run_ranks;

constexpr DType kByte{0, 1};

using Bytes = std::vector<std::byte>;

TensorRef tensor(Bytes& bytes) {
  return {bytes.data(), kByte, {static_cast<int64_t>(bytes.size())}, {1}, nullptr};
}

Bytes coded_bytes(uint64_t key, size_t num_bytes) {
  Bytes bytes(num_bytes);
  for (size_t idx = 0; idx < num_bytes; ++idx)
    bytes[idx] =
        static_cast<std::byte>((key * 0x9e3779b97f4a7c15u + idx * 0xbf58476d1ce4e5b9u) >> 40);
  return bytes;
}

void wait(Communicator& comm, const OperationPtr& operation) {
  comm.wait(*operation, Deadline::max(), nullptr);
}

// Of an operation that `post` posts, at the call or later; null: it succeeds.
FailurePtr failure_of(Communicator& comm, const std::function<OperationPtr()>& post) {
  try {
    wait(comm, post());
  } catch (const PipeCommException& error) {
    return error.failure();
  }
  return nullptr;
}

bool says(const FailurePtr& failure, FailureKind kind, const std::string& text) {
  if (failure && failure->kind == kind && failure->message.find(text) != std::string::npos)
    return true;
  check::fail(__FILE__, __LINE__,
              "'" + text + "' not in: " + (failure ? failure->message : "success"));
  return false;
}

shm::SegmentShape shape_of(int size, int64_t window_bytes = 0) {
  return {.size = size,
          .num_channels = 2,
          .ring_bytes = 64 << 10,
          .window_bytes = window_bytes,
          .epoch = kEpoch};
}

// Ranks with equal numbers are on one host: others see neither their memory nor their processes.
void place(Meeting& meeting, const std::vector<int>& hosts) {
  meeting.look_up = [&meeting, hosts](int rank, int peer) -> std::optional<Introduction> {
    Introduction introduction = meeting.introductions[peer];
    if (hosts[rank] != hosts[peer]) {
      introduction.is_on_this_host = false;
      introduction.pid = 0;
      introduction.memory_fd = -1;
      introduction.reason = "another host";
    }
    return introduction;
  };
}

uint64_t key_of(int source, int destination, int round) {
  return static_cast<uint64_t>((source * 64 + destination) * 1000 + round);
}

// All pairs, in both directions, at once; small and large, before and after their routes are made.
void exchange_with_all(Communicator& comm, int round) {
  const size_t num_bytes = round % 3 == 0 ? 100 : round % 3 == 1 ? 40'000 : 3'000'001;
  std::vector<Bytes> mine(comm.size()), theirs(comm.size());
  std::vector<PointToPoint> batch;
  for (int peer = 0; peer < comm.size(); ++peer) {
    if (peer == comm.rank()) continue;
    mine[peer] = coded_bytes(key_of(comm.rank(), peer, round), num_bytes);
    theirs[peer].resize(num_bytes);
    batch.push_back({Direction::recv, peer, round % 2, tensor(theirs[peer]), 0});
    batch.push_back({Direction::send, peer, round % 2, tensor(mine[peer]), 0});
  }
  wait(comm, comm.batch_p2p(batch, {.is_async = round % 2 == 0}));
  for (int peer = 0; peer < comm.size(); ++peer)
    if (peer != comm.rank())
      CHECK(theirs[peer] == coded_bytes(key_of(peer, comm.rank(), round), num_bytes));
}

void broadcast_from_all(Communicator& comm, size_t num_bytes) {
  for (int source = 0; source < comm.size(); ++source) {
    Bytes bytes = comm.rank() == source ? coded_bytes(source, num_bytes) : Bytes(num_bytes);
    wait(comm, comm.broadcast(tensor(bytes), source));
    CHECK(bytes == coded_bytes(source, num_bytes));
  }
}

// A matrix of bytes cut by columns on one side and by rows on the other: nothing lies in one piece.
void all_to_all(Communicator& comm) {
  const int64_t size = comm.size(), length = 5 * size;
  const Sizes fives(static_cast<size_t>(size), 5);
  const auto plan = std::make_shared<PreparedExchange>(
      all_to_all_plan({comm.rank(), comm.size()}, {{{{length, 5}, kByte}, fives, fives}}, 0, 1));
  Bytes input(static_cast<size_t>(length * 5)), output(static_cast<size_t>(5 * length));
  const auto value = [&](int64_t row, int64_t column) {
    return static_cast<std::byte>(row * 37 + column * 11);
  };
  for (int64_t row = 0; row < length; ++row)
    for (int64_t column = 0; column < 5; ++column)
      input[row * 5 + column] = value(row, comm.rank() * 5 + column);
  const TensorRef in{input.data(), kByte, {length, 5}, {5, 1}, nullptr};
  const TensorRef out{output.data(), kByte, {5, length}, {length, 1}, nullptr};
  wait(comm, comm.exchange(OpCode::all_to_all, plan, {&in, 1}, {&out, 1}));
  for (int64_t row = 0; row < 5; ++row)
    for (int64_t column = 0; column < length; ++column)
      CHECK(output[row * length + column] == value(comm.rank() * 5 + row, column));
}

void test_pairs_take_the_way_that_they_have() {
  for (const auto& hosts : std::vector<std::vector<int>>{
           {0, 0}, {0, 1}, {0, 0, 1, 1}, {0, 1, 0, 1, 2}, {0, 0, 0, 1, 1, 1, 2, 2, 2, 2}}) {
    const int size = static_cast<int>(hosts.size());
    check::context = "mixed " + std::to_string(size);
    Meeting meeting(size);
    meeting.over_tcp().over_memory(shape_of(size, 8 << 20));
    place(meeting, hosts);
    run_ranks(meeting, [&](Communicator& comm) {
      for (int round = 0; round < 6; ++round) exchange_with_all(comm, round);
      for (const size_t num_bytes : {100u, 300'000u}) broadcast_from_all(comm, num_bytes);
      for (int round = 0; round < 3; ++round) all_to_all(comm);
      wait(comm, comm.barrier());
      for (int peer = 0; peer < size; ++peer)
        if (peer != comm.rank())
          CHECK_EQ(comm.route(peer).transport, hosts[peer] == hosts[comm.rank()] ? "shm" : "c10d");
    });
  }
}

// One end cannot use the memory of the other, which the other does not know.
void test_one_end_without_memory() {
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
      for (int round = 0; round < 3; ++round) exchange_with_all(comm, round);
      const Route route = comm.route(1 - comm.rank());
      CHECK_EQ(route.transport, "c10d");
      if (comm.rank() == 1)
        CHECK(route.reason.find(cannot_map ? "the shared memory of rank 0" : "too little memory") !=
              std::string::npos);
    });
  }
}

// Without TCP there is no other way: the pair fails, and with it the communicator.
void test_only_memory_and_none() {
  check::context = "shm alone";
  Meeting meeting(4);
  meeting.over_memory(shape_of(4));
  place(meeting, {0, 0, 0, 1});
  run_ranks(meeting, [&](Communicator& comm) {
    const FailurePtr failure = failure_of(comm, [&] { return comm.barrier(); });
    says(failure, FailureKind::mismatch,
         "transport=\"shm\" is not possible: another host; use \"auto\" or \"c10d\"");
  });
}

// An operation whose rank looked just before its communicator failed whether it had, and posts after.
void test_posting_after_a_refusal() {
  check::context = "post after a refusal";
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
  transport->post({request}, true);
  CHECK(!request->settled);  // its operation has a better reason to fail
}

// Rank 1 makes its communicator later than rank 0, whose messages wait.
void test_a_rank_that_comes_later() {
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

// The store cannot be asked, or nobody is there: the operation says so when its time is over.
void test_a_rank_that_never_comes() {
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
    const PointToPoint recv{Direction::recv, 1, 0, tensor(bytes), 0};
    says(failure_of(*comm, [&] { return comm->batch_p2p({&recv, 1}); }), FailureKind::timeout,
         throws
             ? "rank 1 has not made its communicator, as far as this rank knows: the store is gone"
             : "rank 1 has not made its communicator; check");
    comm->close(nullptr);
  }
}

// All of eight ranks hear that rank 5 refuses, whoever they need.
void test_a_rank_that_refuses() {
  check::context = "refusal";
  Meeting meeting(8);
  meeting.over_tcp();
  meeting.look_up = [&](int, int peer) -> std::optional<Introduction> {
    Introduction introduction = meeting.introductions[peer];
    if (peer == 5) introduction.refusal = "Communicator was refused by rank 5: no reason";
    return introduction;
  };
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 8; ++rank) {
    if (rank == 5) continue;
    ranks.emplace_back([&, rank] {
      const auto comm = meeting.communicator(rank);
      says(failure_of(*comm, [&] { return comm->barrier(); }), FailureKind::mismatch,
           "Communicator was refused by rank 5: no reason");
      comm->close(nullptr);
    });
  }
  for (std::thread& rank : ranks) rank.join();
}

// Rank 0 has gone before rank 1 looks for it: what rank 1 posts fails, and the communicator does not.
void test_a_rank_that_has_left() {
  for (const bool tcp : {false, true}) {
    check::context = tcp ? "left, both" : "left, memory";
    Meeting meeting(2);
    meeting.over_memory(shape_of(2));
    if (tcp) meeting.over_tcp();
    meeting.communicator(0)->close(nullptr);
    const auto comm = meeting.communicator(1);
    Bytes bytes(8);
    for (const Direction direction : {Direction::recv, Direction::send}) {
      const PointToPoint message{direction, 0, 0, tensor(bytes), 0};
      says(failure_of(*comm, [&] { return comm->batch_p2p({&message, 1}); }),
           FailureKind::peer_lost, "has closed its communicator");
    }
    CHECK(comm->failure() == nullptr);
    comm->close(nullptr);
  }
}

// Ranks that post and close at once, while their routes are being made: what has a match arrives.
void test_closing_while_routes_are_made() {
  for (int round = 0; round < 40; ++round) {
    check::context = "closing " + std::to_string(round);
    Meeting meeting(3);
    meeting.over_tcp().over_memory(shape_of(3));
    place(meeting, {0, 0, round % 2});
    std::vector<Bytes> received(3, Bytes(100));
    run_ranks(meeting, [&](Communicator& comm) {
      Bytes mine = coded_bytes(comm.rank(), 100);
      const int next = (comm.rank() + 1) % 3, previous = (comm.rank() + 2) % 3;
      const PointToPoint recv{Direction::recv, previous, 0, tensor(received[comm.rank()]), 0};
      const PointToPoint send{Direction::send, next, 0, tensor(mine), 0};
      comm.batch_p2p({&recv, 1});
      comm.batch_p2p({&send, 1});
      comm.close(nullptr);
    });
    for (int rank = 0; rank < 3; ++rank) CHECK(received[rank] == coded_bytes((rank + 2) % 3, 100));
  }
}

// Messages that wait for a route are dropped with the communicator that fails.
void test_aborting_while_routes_are_made() {
  check::context = "aborting";
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

}  // namespace

int main() {
  test_pairs_take_the_way_that_they_have();
  test_one_end_without_memory();
  test_only_memory_and_none();
  test_posting_after_a_refusal();
  test_a_rank_that_comes_later();
  test_a_rank_that_never_comes();
  test_a_rank_that_refuses();
  test_a_rank_that_has_left();
  test_closing_while_routes_are_made();
  test_aborting_while_routes_are_made();
  return check::report("test_routed");
}
