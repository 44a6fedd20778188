// Collectives of groups that are too large for a message between any two: by the tree, and
// directly, as in a small group, where ranks do not agree.

#include "plan/builders.h"
#include "plan/reshard.h"
#include "thread_ranks.h"

using namespace threads;

constexpr int kSizes[] = {9, 12, 16, 33};

std::string case_of(const char* name, int size) {
  return std::string(name) + ", " + std::to_string(size) + " ranks";
}

TEST(barrier) {
  for (const int size : kSizes) {
    check::context = case_of("barrier", size);
    std::atomic<int> num_arrived{0};
    run_ranks(size, kLong, [&](Communicator& comm, int) {
      for (int round = 0; round < 20; ++round) {
        ++num_arrived;
        wait(comm, comm.barrier());
        CHECK(num_arrived >= size * (round + 1));
      }
      comm.close(nullptr);
    });
  }
}

// From every source: nothing, a message inside a packet, one outside of it, and several pieces.
TEST(broadcast) {
  constexpr int64_t kNumBytes[] = {0, 1, 700, 5000, 2 * kPieceBytes, 2 * kPieceBytes + 77};
  for (const int size : kSizes) {
    check::context = case_of("broadcast", size);
    run_ranks(size, kLong, [&](Communicator& comm, int rank) {
      for (int source = 0; source < size; ++source) {
        const int64_t num_bytes = kNumBytes[source % (size > 16 ? 4 : 6)];
        const Tensor tensor = rank == source ? patterned(num_bytes, source) : Tensor(num_bytes);
        wait(comm, comm.broadcast(tensor.ref(), source));
        CHECK(*tensor.bytes == *patterned(num_bytes, source).bytes);
      }
      comm.close(nullptr);
    });
  }
}

// `num_bytes` from each rank to the ranks at `distances` after it, and nothing to any other.
struct Shifted {
  Shifted(int me, int num_ranks, std::vector<int> steps, int64_t length, int first_seed,
          const DType& dtype = dtypes::kUInt8)
      : rank(me), size(num_ranks), distances(std::move(steps)), seed(first_seed) {
    std::vector<TensorSpec> sent, received;
    for (int peer = 0; peer < size; ++peer) {
      sent.push_back({{reaches(rank, peer) ? length : 0}, dtype});
      received.push_back({{reaches(peer, rank) ? length : 0}, dtype});
      inputs.push_back(patterned(sent.back().bytes(), seed + rank * 64 + peer));
      outputs.emplace_back(received.back().bytes());
    }
    plan = std::make_shared<PreparedExchange>(all_to_all_list_plan({rank, size}, sent, received));
  }

  bool reaches(int from, int to) const {
    return std::ranges::any_of(distances,
                               [&](int distance) { return (from + distance) % size == to; });
  }
  OperationPtr start(Communicator& comm) const {
    return comm.exchange(OpCode::all_to_all, plan, refs(inputs, plan->plan().inputs),
                         refs(outputs, plan->plan().outputs));
  }
  bool is_right() const {
    for (int peer = 0; peer < size; ++peer)
      if (reaches(peer, rank) &&
          *outputs[peer].bytes !=
              *patterned(std::ssize(*outputs[peer].bytes), seed + peer * 64 + rank).bytes)
        return false;
    return true;
  }
  static std::vector<TensorRef> refs(const std::vector<Tensor>& tensors,
                                     const std::vector<TensorSpec>& specs) {
    std::vector<TensorRef> refs;
    for (size_t idx = 0; idx < tensors.size(); ++idx)
      refs.push_back({tensors[idx].bytes->data(),
                      specs[idx].dtype,
                      specs[idx].shape,
                      {1},
                      tensors[idx].bytes});
    return refs;
  }

  int rank, size;
  std::vector<int> distances;
  int seed;
  std::vector<Tensor> inputs, outputs;
  PreparedExchangePtr plan;
};

TEST(exchanges) {
  for (const int size : kSizes) {
    check::context = case_of("exchanges", size);
    std::vector<int> all(size);
    for (int idx = 0; idx < size; ++idx) all[idx] = idx;
    const std::vector<std::vector<int>> patterns{{1}, {}, all, {0}, {2, 5}};
    run_ranks(size, kLong, [&](Communicator& comm, int rank) {
      for (int round = 0; round < 10; ++round) {
        const Shifted exchange(rank, size, patterns[round % 5], round % 2 == 0 ? 300 : 3000, round);
        wait(comm, exchange.start(comm));
        CHECK(exchange.is_right());
      }
      comm.close(nullptr);
    });
  }
}

// Many collectives in flight at once, of all kinds, waited for in any order or not at all, with
// point-to-point messages between them.
TEST(many_in_flight) {
  for (const int size : {9, 16}) {
    check::context = case_of("many in flight", size);
    run_ranks(size, kLong, [&](Communicator& comm, int rank) {
      std::mt19937 random(rank);
      std::vector<OperationPtr> operations;
      std::vector<std::pair<Tensor, uint64_t>> received;
      std::vector<std::unique_ptr<Shifted>> exchanges;
      const auto expect = [&](int64_t num_bytes, uint64_t seed) {
        return received.emplace_back(Tensor(num_bytes), seed).first;
      };
      for (int round = 0; round < 60; ++round) {
        const int64_t num_bytes = round % 4 == 0 ? 20'000 : 10 * round;
        operations.push_back(isend(comm, patterned(num_bytes, 1000 + round), (rank + 1) % size));
        operations.push_back(
            irecv(comm, expect(num_bytes, 1000 + round), (rank + size - 1) % size));
        if (round % 3 == 0) {
          operations.push_back(comm.barrier());
        } else if (round % 3 == 1) {
          const int source = round % size;
          operations.push_back(comm.broadcast(
              (rank == source ? patterned(num_bytes, round) : expect(num_bytes, round)).ref(),
              source));
        } else {
          exchanges.push_back(std::make_unique<Shifted>(rank, size, std::vector<int>{1, 3},
                                                        round % 2 == 0 ? 100 : 4000, round));
          operations.push_back(exchanges.back()->start(comm));
        }
        if (random() % 4 == 0) operations.erase(operations.begin() + random() % operations.size());
      }
      std::shuffle(operations.begin(), operations.end(), random);
      for (const OperationPtr& operation : operations) wait(comm, operation);
      operations.clear();
      comm.close(nullptr);  // the others also end
      for (const auto& [tensor, seed] : received)
        CHECK(*tensor.bytes == *patterned(std::ssize(*tensor.bytes), seed).bytes);
      for (const auto& exchange : exchanges) CHECK(exchange->is_right());
    });
  }
}

// A relay among some of the ranks, and collectives of few members among those of all.
TEST(members) {
  constexpr int kSize = 14;
  check::context = case_of("members", kSize);
  run_ranks(kSize, kLong, [&](Communicator& comm, int rank) {
    const TensorSpec whole{{3000}, dtypes::kUInt8};
    const std::vector<int> few{1, 2, 5}, many{0, 1, 2, 3, 5, 6, 7, 9, 11, 13};
    for (int round = 0; round < 6; ++round) {
      const auto& members = round % 2 == 0 ? few : many;
      const int from = members[0], to = members.back();
      if (std::ranges::find(members, rank) != members.end()) {
        const auto plan = std::make_shared<PreparedExchange>(
            reshard_plan({rank, kSize}, whole, {{from}, {}, true}, {{to}, {}, true}));
        const Tensor tensor = rank == from ? patterned(3000, round) : Tensor(3000);
        const TensorRef ref = tensor.ref();
        const std::span<const TensorRef> held{&ref, 1}, none;
        if (round == 3 && rank == 9) {
          wait(comm, comm.refuse(OpCode::relay, "not me", {members}));
        } else {
          const OperationPtr operation =
              comm.exchange(OpCode::relay, plan, rank == from ? held : none,
                            rank == to ? held : none, {}, {members});
          const Failure failure = failure_of([&] { wait(comm, operation); });
          CHECK_EQ(failure.message,
                   round == 3 ? "relay was refused by rank 9: not me" : "(no failure)");
          if (round != 3 && rank == to) CHECK(*tensor.bytes == *patterned(3000, round).bytes);
        }
      }
      wait(comm, comm.barrier());
    }
    CHECK_INVALID("which is not a member",
                  comm.exchange(OpCode::relay,
                                std::make_shared<PreparedExchange>(
                                    reshard_plan({rank, kSize}, whole, {{rank}, {}, true},
                                                 {{(rank + 1) % kSize}, {}, true})),
                                {{Tensor(3000).ref()}}, {}, {}, {{rank}, kCollectiveChannel}));
    comm.close(nullptr);
  });
}

// The failures of all ranks after `call`, which each rank makes with `limit`.
std::vector<Failure> failures(int size, int limit,
                              const std::function<OperationPtr(Communicator&, int)>& call) {
  std::vector<Failure> failures(size);
  direct_limit = limit;
  run_ranks(size, kLong, [&](Communicator& comm, int rank) {
    const OperationPtr operation = call(comm, rank);
    failures[rank] = failure_of([&] { wait(comm, operation); });
    // The communicator still works, and the ranks are at the same place in their order.
    const Shifted next(rank, size, {1, 2}, 2000, 7);
    wait(comm, next.start(comm));
    CHECK(next.is_right());
    const Tensor tensor = rank == 3 ? patterned(5000, 1) : Tensor(5000);
    wait(comm, comm.broadcast(tensor.ref(), 3));
    CHECK(*tensor.bytes == *patterned(5000, 1).bytes);
    comm.close(nullptr);
  });
  direct_limit = kDirectLimit;
  return failures;
}

// The error texts are also the same.
void check_same_errors(int size, const std::function<OperationPtr(Communicator&, int)>& call) {
  const auto by_tree = failures(size, kDirectLimit, call);
  const auto directly = failures(size, size, call);
  int num_failed = 0;
  for (int rank = 0; rank < size; ++rank) {
    const Failure &a = by_tree[rank], &b = directly[rank];
    const bool failed = b.message != "(no failure)";
    num_failed += failed;
    CHECK_EQ(a.message != "(no failure)", failed);
    CHECK(a.kind == b.kind);
    CHECK_EQ(a.op, b.op);
    CHECK_EQ(a.rank, b.rank);
    // Where several messages of a rank fail, either of them may be first.
    if (a.peer == b.peer && a.origin_rank == b.origin_rank) CHECK_EQ(a.message, b.message);
  }
  CHECK(num_failed > 0);
}

TEST(refusal) {
  for (const int size : {9, 16}) {
    for (int odd = 0; odd < size; odd += 3) {
      check::context = case_of("refusal", size) + ", of rank " + std::to_string(odd);
      const auto refused = failures(size, kDirectLimit, [&](Communicator& comm, int rank) {
        if (rank == odd) return comm.refuse(OpCode::broadcast, "no " + std::to_string(odd));
        return comm.broadcast(Tensor(3000).ref(), (odd + 1) % size);
      });
      for (int rank = 0; rank < size; ++rank)
        CHECK_EQ(refused[rank].message, rank == odd ? "(no failure)"
                                                    : "broadcast was refused by rank " +
                                                          std::to_string(odd) + ": no " +
                                                          std::to_string(odd));
    }
  }
  check::context = "refusal while data are under way";
  constexpr int kSize = 12;
  std::vector<int> all(kSize);
  for (int idx = 0; idx < kSize; ++idx) all[idx] = idx;
  std::vector<std::unique_ptr<Shifted>> kept(kSize);
  const auto refused = failures(kSize, kDirectLimit, [&](Communicator& comm, int rank) {
    if (rank == 5) {
      std::this_thread::sleep_for(20ms);  // the others have posted theirs
      return comm.refuse(OpCode::all_to_all, "late");
    }
    kept[rank] = std::make_unique<Shifted>(rank, kSize, all, rank % 2 == 0 ? 4000 : 4000, 1);
    return kept[rank]->start(comm);
  });
  for (int rank = 0; rank < kSize; ++rank)
    if (rank != 5)
      CHECK_FAILURE(refused[rank], mismatch, 5, "all_to_all was refused by rank 5: late");
}

TEST(disagreement) {
  constexpr int kSize = 12;
  check::context = "sizes of a broadcast";
  check_same_errors(kSize, [](Communicator& comm, int rank) {
    return comm.broadcast(Tensor(rank == 7 ? 5000 : 4000).ref(), 2);
  });
  check::context = "sources of a broadcast";
  check_same_errors(kSize, [](Communicator& comm, int rank) {
    return comm.broadcast(Tensor(4000).ref(), rank == 4 ? 4 : 0);
  });
  check::context = "operations";
  check_same_errors(kSize, [](Communicator& comm, int rank) {
    return rank == 11 ? comm.barrier() : comm.broadcast(Tensor(10).ref(), 0);
  });
  // Two ranks differ about one message, which no third one is part of.
  for (const bool in_dtype : {false, true}) {
    check::context = in_dtype ? "dtypes of one message" : "bytes of one message";
    std::vector<std::unique_ptr<Shifted>> kept(kSize);
    const auto heard = failures(kSize, kDirectLimit, [&](Communicator& comm, int rank) {
      kept[rank] = std::make_unique<Shifted>(rank, kSize, std::vector<int>{1},
                                             rank == 6 && !in_dtype ? 3000 : 4000, 1,
                                             rank == 6 && in_dtype ? DType{1, 1} : dtypes::kUInt8);
      return kept[rank]->start(comm);
    });
    for (const int rank : {5, 6, 7}) {
      CHECK_FAILURE(heard[rank], mismatch, heard[rank].origin_rank, "all_to_all");
      CHECK_EQ(heard[rank].rank, rank);
    }
    CHECK_EQ(heard[5].peer, 6);
    CHECK_EQ(heard[7].peer, 6);
  }
}

TEST(timeout) {
  constexpr int kSize = 12;
  for (const int absent : {0, 5, 11}) {
    check::context = "timeout, without rank " + std::to_string(absent);
    std::barrier everybody(kSize);
    const auto hub = std::make_shared<local::Hub>(kSize);
    check::in_threads(kSize, [&](int rank) {
      const auto comm = join(hub, options_of(rank, kSize, 300ms));
      if (rank != absent) {
        const Tensor tensor(100);
        OperationPtr first, second;
        const Failure late = failure_of([&] {  // if the machine stalled for so long
          first = comm->barrier();
          second = comm->broadcast(tensor.ref(), 1);
        });
        if (!second) CHECK(late.kind == FailureKind::timeout);
        for (const OperationPtr& operation : {first, second}) {
          if (!operation) continue;
          const Failure failure = failure_of([&] { wait(*comm, operation); });
          CHECK(failure.kind == FailureKind::timeout);
          CHECK_EQ(failure.op, operation == first ? "barrier" : "broadcast");
          CHECK(failure.message.find("barrier timed out after") != std::string::npos);
          CHECK(failure.message.find(" is connected and speaks for other ranks as well; ") !=
                std::string::npos);
          CHECK(failure.message.find("channel") == std::string::npos);  // the caller knows of none
        }
      }
      everybody.arrive_and_wait();
      const auto end = [&](const std::function<OperationPtr()>& call) {
        return failure_of([&] { wait(*comm, call()); });
      };
      const auto expect_timeout = [&](const Failure& failure) {
        CHECK_FAILURE(failure, timeout, failure.origin_rank, "barrier timed out after");
      };
      if (rank == absent) {
        // This rank may not know of the failure yet, and rank 0, which has got the statements of
        // all, completes the barrier immediately. Later calls fail with the first cause.
        const Tensor tensor(100);
        const Failure first = end([&] { return comm->barrier(); });
        if (rank != 0 || first.message != "(no failure)") expect_timeout(first);
        expect_timeout(end([&] { return comm->broadcast(tensor.ref(), 1); }));
      }
      expect_timeout(end([&] { return comm->barrier(); }));
      comm->close(nullptr);
    });
  }
}

// Aborted at any moment, also inside the tree: all calls end, and nothing leaks.
TEST(abort) {
  constexpr int kSize = 9;
  for (int round = 0; round < 12; ++round) {
    check::context = "abort, round " + std::to_string(round);
    std::vector<std::weak_ptr<void>> storages[kSize];
    run_ranks(kSize, kLong, [&](Communicator& comm, int rank) {
      for (int idx = 0;; ++idx) {
        const Tensor tensor(idx % 3 == 0 ? 2 * kPieceBytes : 500);
        storages[rank].push_back(tensor.bytes);
        const Failure failure = failure_of([&] {
          if (rank == round % kSize && idx == 3 + round) comm.abort("enough");
          const OperationPtr operation = comm.broadcast(tensor.ref(), idx % kSize);
          comm.barrier();
          if (idx % 2 == 0) wait(comm, operation);
        });
        if (failure.message == "(no failure)") continue;
        CHECK_FAILURE(failure, aborted, round % kSize, "enough");
        break;
      }
      if (round % 2 == 0) comm.close(nullptr);
    });
    for (const auto& all : storages)
      for (const auto& storage : all) CHECK(storage.expired());
  }
}

TEST(peer_lost) {
  constexpr int kSize = 12;
  for (const int dead : {0, 4, 11}) {
    check::context = "peer lost, rank " + std::to_string(dead);
    const auto hub = std::make_shared<local::Hub>(kSize);
    std::barrier everybody(kSize);
    run_ranks(
        kSize, kLong,
        [&](Communicator& comm, int rank) {
          OperationPtr operation;
          if (rank != dead) operation = comm.barrier();
          everybody.arrive_and_wait();
          if (rank == dead) hub->disconnect(dead);
          if (operation)
            CHECK_FAILURE(failure_of([&] { wait(comm, operation); }), peer_lost, dead,
                          "lost the connection to rank " + std::to_string(dead));
          everybody.arrive_and_wait();
          comm.close(nullptr);
        },
        hub);
  }
}

// A rank closes instead of joining in: the operation fails on all others, the communicator does not.
TEST(closed_member) {
  constexpr int kSize = 12;
  for (const int gone : {0, 4, 8, 11}) {
    check::context = "closed member " + std::to_string(gone);
    std::barrier everybody(kSize);
    run_ranks(kSize, kLong, [&](Communicator& comm, int rank) {
      wait(comm, comm.barrier());
      if (rank == gone) {
        comm.close(nullptr);
      } else {
        const Tensor tensor(4000);
        const OperationPtr operations[] = {comm.barrier(), comm.broadcast(tensor.ref(), 1)};
        for (const OperationPtr& operation : operations)
          CHECK_FAILURE(failure_of([&] { wait(comm, operation); }), peer_lost, gone,
                        "rank " + std::to_string(gone) + " has closed its communicator");
        const int next = (rank + 1) % kSize == gone ? (rank + 2) % kSize : (rank + 1) % kSize;
        const int last = (rank + kSize - 1) % kSize == gone ? (rank + kSize - 2) % kSize
                                                            : (rank + kSize - 1) % kSize;
        const Tensor received(300);
        const OperationPtr send = isend(comm, patterned(300, 1), next);
        wait(comm, irecv(comm, received, last));
        wait(comm, send);
        CHECK(*received.bytes == *patterned(300, 1).bytes);
        CHECK(comm.failure() == nullptr);
      }
      everybody.arrive_and_wait();
      comm.close(nullptr);
    });
  }
}

// close() waits for collectives in flight, which end once a member that takes no part closes.
TEST(close_with_pending) {
  constexpr int kSize = 12;
  for (const int odd : {0, 4, 11}) {
    check::context = "close with pending collectives, without rank " + std::to_string(odd);
    run_ranks(kSize, kLong, [&](Communicator& comm, int rank) {
      const Tensor tensor = rank == 2 ? patterned(4000, 1) : Tensor(4000);
      const OperationPtr first = comm.broadcast(tensor.ref(), 2);
      OperationPtr pending[2];
      if (rank != odd)
        for (OperationPtr& operation : pending) operation = comm.barrier();
      const Failure failure = failure_of([&] { comm.close(nullptr); });
      CHECK(first->done() && first->failure() == nullptr);
      CHECK(*tensor.bytes == *patterned(4000, 1).bytes);
      if (rank == odd) {
        CHECK_EQ(failure.message, "(no failure)");
      } else {
        CHECK_FAILURE(failure, peer_lost, odd, "has closed its communicator");
        CHECK(pending[0]->done() && pending[1]->done());
      }
    });
  }
}

// The flight record of a pending operation.
TEST(flight_record) {
  constexpr int kSize = 12;
  check::context = "flight record";
  std::barrier everybody(kSize);
  run_ranks(kSize, kLong, [&](Communicator& comm, int rank) {
    if (rank == 4) everybody.arrive_and_wait();
    const OperationPtr operation = comm.barrier();
    if (rank != 4) {
      if (rank == 0) {  // its children are 8, 4, 2 and 1
        CHECK_EQ(operation->first_pending()->descriptor.channel, kControlChannel);
        const auto flights = comm.flights();
        CHECK_EQ(flights.size(), 1u);
        bool waits_for_it = false;
        for (const FlightMessage& message : flights[0].messages)
          waits_for_it |= message.peer == 4 && message.direction == Direction::recv &&
                          message.state == MessageState::posted;
        CHECK(waits_for_it);
        CHECK(operation->pending_text().find("recv pending") != std::string::npos);
      }
      everybody.arrive_and_wait();
    }
    wait(comm, operation);
    const auto flights = comm.flights();
    CHECK_EQ(flights.size(), 1u);
    CHECK(flights[0].operation.ended);
    const TreePlace place = tree_place(rank, kSize);
    CHECK_EQ(flights[0].messages.size(), 2 * (place.children.size() + (place.is_root() ? 0 : 1)));
    comm.close(nullptr);
  });
}
