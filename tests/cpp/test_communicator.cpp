// Communicators of several threads as ranks: results and failures of calls, at any timing. Most of
// these tests are meant to run under ThreadSanitizer and AddressSanitizer.
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "engine/aliasing.h"
#include "host_exchanges.h"
#include "plan/builders.h"
#include "plan/reshard.h"
#include "thread_ranks.h"

using namespace threads;

// Runs with messages between every two ranks, and with the tree.
#define TEST_TWICE(name)              \
  static void name##_at_a_limit();    \
  TEST(name) { name##_at_a_limit(); } \
  TEST(name##_by_the_tree) {          \
    direct_limit = 1;                 \
    name##_at_a_limit();              \
    direct_limit = kDirectLimit;      \
  }                                   \
  static void name##_at_a_limit()

// Must be the first test: no thread of another test exists when it forks.
TEST(fork) {
  const auto hub = std::make_shared<local::Hub>(1);
  const auto comm = join(hub, options_of(0, 1));
  // A thread that is just starting may hold a lock of a sanitizer's allocator, which stays locked in
  // the child.
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);
    const bool refused =
        failure_of([&] { comm->barrier(); }).message.find("was forked") != std::string::npos;
    comm->abort("in the child");
    comm->close(nullptr);
    _exit(refused && comm->is_in_fork() ? 0 : 1);
  }
  int status = -1;
  CHECK_EQ(waitpid(child, &status, 0), child);
  CHECK_EQ(status, 0);
  CHECK(!comm->is_in_fork());
  wait(*comm, comm->barrier());
}

TEST_TWICE(random_programs) {
  for (int seed = 0; seed < check::rounds(8); ++seed) {
    check::context = "program " + std::to_string(seed);
    const meeting::Program program(seed, 4, 3, 100'000, 300);
    run_ranks(program.size, kLong, [&](Communicator& comm, int) { meeting::play(program, comm); });
  }
}

TEST_TWICE(exchange) {
  run_ranks(3, kLong, [](Communicator& comm, int) {
    int64_t num_allocations = 0;
    for (int round = 1; round <= 3; ++round) {  // bodies and staging on both sides
      meeting::all_to_all(comm, {2, 12, 6, 2000}, 2, 1);
      wait(comm, comm.barrier());
      const CopyCounters counters = comm.execution().copy_counters();
      CHECK_EQ(counters.num_exchanges, 3 * round);
      CHECK_EQ(counters.num_passes, 6 * round);
      if (round == 1) num_allocations = counters.num_staging_allocations;
      CHECK_EQ(counters.num_staging_allocations, num_allocations);
    }
    comm.close(nullptr);
  });
}

// From rank 0 to 1 and on to 2, which waits only at the end: rank 1 passes data on without waiting
// for them. Rank 0 refuses some rounds; then the second hop is not posted.
TEST_TWICE(exchanges_that_follow_each_other) {
  constexpr int kSize = 3, kNumRounds = 40;
  const auto refuses = [](int round) { return round % 7 == 3; };
  run_ranks(kSize, kLong, [&](Communicator& comm, int rank) {
    std::vector<Tensor> tensors;
    std::vector<OperationPtr> first, second;
    for (int round = 0; round < kNumRounds; ++round) {
      const int64_t num_bytes = round % 3 == 0 ? 50'000 : 1 + round;
      const TensorSpec whole{{num_bytes}, dtypes::kUInt8};
      const auto hop = [&](int from, int to) {
        return std::make_shared<PreparedExchange>(
            reshard_plan({rank, kSize}, whole, {{from}, {}, true}, {{to}, {}, true}));
      };
      tensors.push_back(rank == 0 ? patterned(num_bytes, round) : Tensor(num_bytes));
      const TensorRef tensor = tensors.back().ref();
      const std::span<const TensorRef> held{&tensor, 1}, none;
      if (rank == 0 && refuses(round))
        first.push_back(comm.refuse(OpCode::relay, "not now", {{}, 1}));
      else
        first.push_back(comm.exchange(OpCode::relay, hop(0, 1), rank == 0 ? held : none,
                                      rank == 1 ? held : none, {}, {{}, 1}));
      if (rank == 0) continue;
      second.push_back(comm.exchange(OpCode::relay, hop(1, 2), rank == 1 ? held : none,
                                     rank == 2 ? held : none, {}, {{1, 2}, 1}, first.back()));
    }
    for (int round = kNumRounds - 1; round >= 0; --round) {
      if (rank == 0) {
        wait(comm, first[round]);
      } else if (refuses(round)) {
        CHECK_FAILURE(failure_of([&] { wait(comm, second[round]); }), mismatch, 0,
                      "refused by rank 0: not now");
      } else {
        wait(comm, second[round]);
        CHECK(*tensors[round].bytes ==
              *patterned(int64_t(tensors[round].bytes->size()), round).bytes);
      }
    }
    CHECK_INVALID("channel 3 is not in 0..2", comm.refuse(OpCode::relay, "", {{}, 3}));
    CHECK_INVALID("members must be increasing ranks of 0..2",
                  comm.refuse(OpCode::relay, "", {{(rank + 1) % kSize}, 1}));
    wait(comm, comm.barrier());
  });
}

// The time of an exchange begins when the one before it has ended.
TEST_TWICE(what_follows_has_a_deadline_of_its_own) {
  run_ranks(2, kLong, [](Communicator& comm, int rank) {
    const TensorSpec whole{{8}, dtypes::kUInt8};
    const auto plan = std::make_shared<PreparedExchange>(
        reshard_plan({rank, 2}, whole, {{0}, {}, true}, {{1}, {}, true}));
    const Tensor tensor(8);
    const TensorRef ref = tensor.ref();
    const std::span<const TensorRef> held{&ref, 1}, none;
    const auto post = [&](const OperationPtr& after) {
      return comm.exchange(OpCode::relay, plan, rank == 0 ? held : none, rank == 1 ? held : none,
                           {}, {{}, 0}, after);
    };
    if (rank == 0) wait(comm, comm.barrier());
    const OperationPtr first = post(nullptr), second = post(first);
    const Deadline of_its_call = Clock::now() + kLong;
    if (rank == 1) wait(comm, comm.barrier());
    wait(comm, second);
    if (rank == 1) CHECK(second->deadline() > of_its_call);
    comm.close(nullptr);
  });
}

// An input may be a slice of an output if nothing is received there.
TEST(slices_that_stay) {
  const ShardLayout pieces{{0, 1}, {}, false, 1}, whole{{0, 1}, {}, true, 1};
  const TensorSpec spec{{2, 6}, dtypes::kUInt8};
  const auto plan = [&](bool in_place) {
    return reshard_plan({1, 2}, spec, pieces, whole, {.own_in_place = in_place});
  };
  const Tensor tensor(12);
  const auto slice = [&](int64_t column, int64_t width) {
    TensorRef ref = tensor.ref();
    ref.data += column;
    ref.shape = {2, width};
    ref.strides = {6, 1};
    return ref;
  };
  const TensorRef all = slice(0, 6), own = slice(3, 3), moved = slice(2, 3);
  for (bool in_place : {true, false}) {
    check_aliasing(plan(in_place), {&own, 1}, {&all, 1});
    CHECK_INVALID("inputs[0] and outputs[0] share memory",
                  check_aliasing(plan(in_place), {&moved, 1}, {&all, 1}));
  }
}

// Exchanges that are queued behind one that never comes end with the communicator.
TEST_TWICE(what_follows_ends_with_the_communicator) {
  run_ranks(2, kLong, [&](Communicator& comm, int rank) {
    const TensorSpec whole{{8}, dtypes::kUInt8};
    const auto plan = std::make_shared<PreparedExchange>(
        reshard_plan({rank, 2}, whole, {{0}, {}, true}, {{1}, {}, true}));
    const Tensor tensor(8);
    const TensorRef ref = tensor.ref();
    if (rank == 1) {
      const auto post_and_wait = [&] {  // the abort may come before the first is posted
        const auto first = comm.exchange(OpCode::relay, plan, {}, {&ref, 1}, {}, {{}, 0});
        wait(comm, comm.exchange(OpCode::relay, plan, {}, {&ref, 1}, {}, {{}, 0}, first));
      };
      CHECK_FAILURE(failure_of(post_and_wait), aborted, 0, "enough");
    } else {
      comm.abort("enough");
    }
    comm.close(nullptr);
  });
}

TEST_TWICE(broadcast_and_barrier) {
  constexpr int kSize = 4;
  std::atomic<int> num_arrived{0};
  run_ranks(kSize, kLong, [&](Communicator& comm, int rank) {
    for (int round = 0; round < 20; ++round) {
      const int64_t num_bytes = round % 3 == 0 ? 50'000 : round;
      const bool is_source = round % kSize == rank;
      const Tensor tensor = is_source ? patterned(num_bytes, round) : Tensor(num_bytes);
      wait(comm, comm.broadcast(tensor.ref(), round % kSize));
      CHECK(*tensor.bytes == *patterned(num_bytes, round).bytes);
      ++num_arrived;
      wait(comm, comm.barrier());
      CHECK(num_arrived >= kSize * (round + 1));
    }
  });
}

TEST_TWICE(messages_to_myself) {
  run_ranks(2, kLong, [&](Communicator& comm, int rank) {
    const Tensor from = patterned(100, rank), to(100), shorter(99);
    const PointToPoint pair[] = {{Direction::send, rank, 1, from.ref()},
                                 {Direction::recv, rank, 1, to.ref()}};
    wait(comm, comm.batch_p2p(pair));
    CHECK(*to.bytes == *from.bytes);
    const PointToPoint wrong[] = {{Direction::send, rank, 1, from.ref()},
                                  {Direction::recv, rank, 1, shorter.ref()}};
    CHECK_INVALID("carries [100] uint8, but the receive expects [99] uint8", comm.batch_p2p(wrong));
    CHECK_INVALID("there are 1 sends and 0 receives", comm.batch_p2p({wrong, 1}));
    wait(comm, comm.batch_p2p({}));
  });
}

// Refused before anything is posted: the next call works.
TEST(bad_arguments) {
  run_ranks(2, kLong, [&](Communicator& comm, int rank) {
    const Tensor tensor(8);
    CHECK_INVALID("peer 2 is not in 0..1", isend(comm, tensor, 2));
    CHECK_INVALID("peer -1 is not in 0..1", irecv(comm, tensor, -1));
    CHECK_INVALID("channel 3 is not in 0..2", isend(comm, tensor, 1 - rank, 3));
    CHECK_INVALID("source rank 5 is not in 0..1", comm.broadcast(tensor.ref(), 5));
    const PointToPoint shared[] = {{Direction::recv, 1 - rank, 0, tensor.ref()},
                                   {Direction::send, 1 - rank, 0, tensor.ref()}};
    CHECK_INVALID("ops[0] and ops[1] share memory", comm.batch_p2p(shared));
    const auto plan = std::make_shared<PreparedExchange>(
        gather_plan({1 - rank, 2}, {{2}, dtypes::kUInt8}, 0, {{{0, 2}}, {{2, 2}}}));
    CHECK_INVALID("the plan is for rank", comm.exchange(OpCode::exchange, plan, {}, {}));
    wait(comm, comm.barrier());
  });
  CHECK_INVALID("rank 2 is not in a group of 2", Communicator(options_of(2, 2), nullptr));
  CommunicatorOptions options = options_of(0, 1);
  options.num_channels = 16;
  CHECK_INVALID("channels must be 1 to 15, not 16", Communicator(options, nullptr));
}

// A rank cannot take part, or has other arguments: all ranks report it, and the next call works.
TEST_TWICE(refusal_and_mismatch) {
  constexpr int kSize = 3;
  run_ranks(kSize, kLong, [&](Communicator& comm, int rank) {
    for (int round = 0; round < 30; ++round) {
      const int odd = round % kSize;
      const Tensor tensor(round % 2 == 0 ? 10 : 40'000), larger(50'000);
      const bool refuses = round % 5 < 3;
      if (rank == odd && refuses) {
        comm.refuse(OpCode::broadcast, "it is round " + std::to_string(round));
      } else {
        const OperationPtr operation = comm.broadcast((rank == odd ? larger : tensor).ref(), 0);
        const Failure failure = failure_of([&] { wait(comm, operation); });
        CHECK(failure.kind == FailureKind::mismatch);
        CHECK_EQ(failure.rank, rank);
        if (refuses) {
          CHECK_FAILURE(
              failure, mismatch, odd,
              "refused by rank " + std::to_string(odd) + ": it is round " + std::to_string(round));
        } else {
          CHECK(failure.peer == odd || rank == odd);
          CHECK(failure.message.find("nothing was transferred") != std::string::npos);
          CHECK(failure.message.starts_with("this rank calls broadcast of uint8["));
          CHECK(failure.message.find("channel") == std::string::npos);
        }
      }
      wait(comm, comm.barrier());
    }
    // Another operation, and point-to-point with other shapes.
    const OperationPtr operation = rank == 1 ? comm.broadcast(Tensor(4).ref(), 1) : comm.barrier();
    CHECK(failure_of([&] { wait(comm, operation); }).kind == FailureKind::mismatch);
    if (rank < 2) {
      const Tensor tensor(rank == 0 ? 70'000 : 60'000);
      const OperationPtr message = rank == 0 ? isend(comm, tensor, 1) : irecv(comm, tensor, 0);
      const Failure failure = failure_of([&] { wait(comm, message); });
      CHECK_FAILURE(failure, mismatch, 1, "uint8[70000]");
      CHECK_FAILURE(failure, mismatch, 1, "uint8[60000]");
    }
    wait(comm, comm.barrier());
    comm.close(nullptr);
  });
}

TEST_TWICE(timeout) {
  std::barrier everybody(3);
  run_ranks(3, 300ms, [&](Communicator& comm, int rank) {
    const auto started = Clock::now();
    const Tensor tensor(16);
    // No rank sends the message that rank 0 expects.
    OperationPtr operation;
    if (rank != 0) operation = comm.barrier();
    everybody.arrive_and_wait();
    if (rank == 0) {
      operation = irecv(comm, tensor, 1, 2);
      failure_of([&] {  // unless this thread stalled until the deadline
        CHECK(!comm.wait(*operation, Clock::now() + 20ms, nullptr));
      });
    }
    const Failure failure = failure_of([&] { wait(comm, operation); });
    CHECK_FAILURE(failure, timeout, 0, "p2p timed out after ");
    CHECK_FAILURE(failure, timeout, 0, "0 send, 1 recv pending; rank 1 is connected");
    CHECK_FAILURE(failure, timeout, 0, "doctor --flight FOLDER` shows which rank waited for which");
    if (rank == 0) {
      CHECK_FAILURE(failure, timeout, 0, "recv #0 on channel 2 from rank 1 of uint8[16]");
      CHECK(failure.channel == 2 && failure.peer == 1 && failure.seq == 0);
      CHECK(failure.shape == std::vector<int64_t>{16} && failure.dtype == "uint8");
    } else {
      CHECK_FAILURE(failure, timeout, 0, "communicator failed on rank 0");
      CHECK_EQ(failure.op, "barrier");
    }
    CHECK_EQ(failure.rank, rank);
    // Later calls report the same cause.
    CHECK_FAILURE(failure_of([&] { comm.barrier(); }), timeout, 0, "p2p timed out");
    CHECK_FAILURE(failure_of([&] { comm.refuse(OpCode::barrier, ""); }), timeout, 0,
                  "p2p timed out");
    comm.abort("too late");
    comm.close(nullptr);
    CHECK_FAILURE(failure_of([&] { comm.barrier(); }), timeout, 0, "p2p timed out");
    CHECK(Clock::now() - started < 20s);
  });
}

TEST_TWICE(peer_lost) {
  constexpr int kSize = 4;
  const auto hub = std::make_shared<local::Hub>(kSize);
  std::barrier everybody(kSize);
  run_ranks(
      kSize, kLong,
      [&](Communicator& comm, int rank) {
        const Tensor small(8), large(200'000);
        std::vector<OperationPtr> operations;
        if (rank != 3) {
          operations.push_back(irecv(comm, small, 3));
          operations.push_back(isend(comm, large, 3, 1));
          operations.push_back(comm.barrier());
        }
        everybody.arrive_and_wait();
        if (rank == 3) hub->disconnect(3);
        for (const OperationPtr& operation : operations) {
          const Failure failure = failure_of([&] { wait(comm, operation); });
          CHECK_FAILURE(failure, peer_lost, 3, "lost the connection to rank 3");
        }
        if (rank != 3) CHECK_FAILURE(failure_of([&] { comm.barrier(); }), peer_lost, 3, "rank 3");
        everybody.arrive_and_wait();
        comm.close(nullptr);
      },
      hub);
}

// An abort by another thread, in the middle of posts and waits of several threads: every call ends,
// and nothing leaks.
TEST_TWICE(abort_in_the_middle) {
  constexpr int kSize = 3, kNumThreads = 3;
  for (int round = 0; round < 12; ++round) {
    check::context = "abort, round " + std::to_string(round);
    std::vector<std::weak_ptr<void>> storages[kSize];
    run_ranks(kSize, kLong, [&](Communicator& comm, int rank) {
      std::mutex storages_mutex;
      std::atomic<int> num_posted{0};
      std::vector<std::thread> threads;
      for (int thread_idx = 0; thread_idx < kNumThreads; ++thread_idx) {
        threads.emplace_back([&, thread_idx] {
          std::mt19937 random(round * 100 + rank * 10 + thread_idx);
          while (true) {
            const Tensor tensor(random() % 4 == 0 ? 70'000 : 100);
            {
              std::lock_guard lock(storages_mutex);
              storages[rank].push_back(tensor.bytes);
            }
            const int peer = (rank + 1 + int(random() % 2)) % kSize;
            OperationPtr operation;
            const Failure failure = failure_of([&] {
              operation = random() % 2 == 0 ? isend(comm, tensor, peer, thread_idx)
                                            : irecv(comm, tensor, peer, thread_idx);
              ++num_posted;
              if (random() % 4 == 0) wait(comm, operation);
            });
            if (failure.kind == FailureKind::aborted) break;
          }
        });
      }
      if (rank == round % kSize) {
        while (num_posted < kNumThreads) std::this_thread::yield();
        comm.abort("enough");
        comm.abort("again");
      }
      for (std::thread& thread : threads) thread.join();
      CHECK_FAILURE(failure_of([&] { comm.barrier(); }), aborted, round % kSize, "enough");
      if (round % 2 == 0) comm.close(nullptr);
    });
    for (const auto& all : storages)
      for (const auto& storage : all) CHECK(storage.expired());
  }
}

// Messages that can still match do; the others fail on both ends.
TEST_TWICE(close) {
  for (int round = 0; round < 10; ++round) {
    check::context = "close, round " + std::to_string(round);
    run_ranks(2, kLong, [&](Communicator& comm, int rank) {
      constexpr int kNumSends = 200;  // more than a peer lets wait unmatched
      const Tensor extra(8);
      if (rank == 0) {
        for (int idx = 0; idx < kNumSends; ++idx) isend(comm, patterned(kMaxInlineBytes, idx), 1);
        const OperationPtr never = irecv(comm, extra, 1);
        const Failure failure = failure_of([&] { comm.close(nullptr); });
        CHECK_FAILURE(failure, peer_lost, 1, "rank 1 has closed its communicator");
        CHECK(never->done());
      } else {
        std::vector<Tensor> tensors;
        std::vector<OperationPtr> operations;
        for (int idx = 0; idx < kNumSends; ++idx) {
          if (idx == kNumSends / 2 && round % 2 == 0) std::this_thread::sleep_for(5ms);
          tensors.emplace_back(kMaxInlineBytes);
          operations.push_back(irecv(comm, tensors.back(), 0));
        }
        for (int idx = 0; idx < kNumSends; ++idx) {
          wait(comm, operations[idx]);
          CHECK(*tensors[idx].bytes == *patterned(kMaxInlineBytes, idx).bytes);
        }
        // Seen by a waiter, it is not reported again by close().
        const OperationPtr never = irecv(comm, extra, 0);
        CHECK_FAILURE(failure_of([&] { wait(comm, never); }), peer_lost, 0,
                      "rank 0 has closed its communicator");
        comm.close(nullptr);
      }
      comm.close(nullptr);
      CHECK(comm.closed());
      CHECK_FAILURE(failure_of([&] { comm.barrier(); }), aborted, rank,
                    "barrier on a closed communicator");
      comm.abort("after the end");
      CHECK(comm.failure() == nullptr);
    });
  }
}

// Calls of other threads while one closes: each is refused or ends, none is forgotten.
TEST_TWICE(close_while_posting) {
  for (int round = 0; round < 20; ++round) {
    check::context = "close while posting, round " + std::to_string(round);
    run_ranks(2, kLong, [&](Communicator& comm, int rank) {
      std::atomic<int> num_posted{0};
      std::vector<std::thread> threads;
      for (int channel = 0; channel < 2; ++channel) {
        threads.emplace_back([&, channel] {
          while (true) {
            const Tensor tensor(8);
            OperationPtr operation;
            Failure failure = failure_of([&] {
              operation = channel == rank ? isend(comm, tensor, 1 - rank, channel)
                                          : irecv(comm, tensor, 1 - rank, channel);
            });
            if (!operation) {
              CHECK_FAILURE(failure, aborted, rank, "on a closed communicator");
              return;
            }
            ++num_posted;
            failure = failure_of([&] { wait(comm, operation); });
            if (failure.message != "(no failure)")
              CHECK_FAILURE(failure, peer_lost, 1 - rank, "has closed its communicator");
          }
        });
      }
      while (num_posted < 3 * round) std::this_thread::yield();
      failure_of([&] { comm.close(nullptr); });
      CHECK(comm.closed());
      for (std::thread& thread : threads) thread.join();
    });
  }
}

// A signal in the middle of close(): it ends all the same; pending operations fail, also on peers.
TEST_TWICE(interrupted_close) {
  std::barrier everybody(2);
  run_ranks(2, kLong, [&](Communicator& comm, int rank) {
    struct Interrupt {};
    if (rank == 0) {
      const Tensor tensor(8);
      const OperationPtr operation = irecv(comm, tensor, 1);
      std::thread waiter([&] {
        CHECK_FAILURE(failure_of([&] { wait(comm, operation); }), aborted, 0,
                      "aborted by rank 0: its close() was interrupted; this rank was waiting");
      });
      bool interrupted = false;
      try {
        comm.close([] { throw Interrupt(); });
      } catch (const Interrupt&) {
        interrupted = true;
      }
      CHECK(interrupted && comm.closed());
      waiter.join();
      comm.close(nullptr);
    } else {  // it sees the close or its interruption, whichever comes first
      const Tensor tensor(100'000);
      const Failure failure = failure_of([&] { wait(comm, irecv(comm, tensor, 0)); });
      CHECK_EQ(failure.origin_rank, 0);
    }
    everybody.arrive_and_wait();
  });
}

// Without close(): peers learn of the end, and the tensors of pending operations are released.
TEST_TWICE(dropped_communicator) {
  std::weak_ptr<void> storage;
  std::barrier everybody(2);
  run_ranks(2, kLong, [&](Communicator& comm, int rank) {
    const Tensor tensor(100'000);
    if (rank == 0) {
      storage = tensor.bytes;
      irecv(comm, tensor, 1);
      irecv(comm, tensor, 1, 1);
      everybody.arrive_and_wait();
      return;
    }
    everybody.arrive_and_wait();
    // The failure may be here before the receive is posted, or after.
    CHECK_FAILURE(failure_of([&] { wait(comm, irecv(comm, tensor, 0)); }), aborted, 0,
                  "its communicator was dropped with operations in flight, without close()");
  });
  CHECK(storage.expired());
}

// A watchdog that has been idle ticks at once when an operation is posted: its deadline may be near.
TEST(a_post_wakes_the_watchdog) {
  class Ticking final : public HostTransport {
   public:
    explicit Ticking(std::atomic<int>& num_ticks) : num_ticks_(num_ticks) {}
    void post(std::span<const RequestPtr>, bool) override {}
    bool tick() override {
      num_ticks_.fetch_add(1);
      num_ticks_.notify_all();
      return false;
    }
    void abort(const Failure&) override {}
    void begin_close() override {}
    void close(Deadline) override {}
    std::string describe_peer(int) const override { return ""; }

   private:
    std::atomic<int>& num_ticks_;
  };
  std::chrono::nanoseconds shortest = std::chrono::hours(1);  // any one may be longer on busy cores
  for (int round = 0; round < 3; ++round) {
    std::atomic<int> num_ticks{0};
    Communicator comm(options_of(0, 2),
                      [&](TransportEvents&) { return std::make_unique<Ticking>(num_ticks); });
    const auto time_of_tick = [&] {
      const auto begin = Clock::now();
      num_ticks.wait(num_ticks.load());
      return Clock::now() - begin;
    };
    while (time_of_tick() < 125ms) {
    }
    const Tensor tensor(1);
    const OperationPtr pending = irecv(comm, tensor, 1);
    shortest = std::min<std::chrono::nanoseconds>(shortest, time_of_tick());
  }
  CHECK(shortest < 125ms);
}

// A transport whose threads report a failure before its constructor returns, and whose abort is
// slow: the owner's next call must wait until the abort is complete.
TEST(failure_during_construction) {
  class Hasty final : public HostTransport {
   public:
    Hasty(TransportEvents& events, std::atomic<int>& num_aborts)
        : num_aborts_(num_aborts), reporter_([&events] { events.on_peer_lost(1, "gone"); }) {
      std::this_thread::sleep_for(20ms);
    }
    ~Hasty() override { close(Clock::now()); }
    void post(std::span<const RequestPtr>, bool) override { CHECK(false); }
    bool tick() override { return false; }
    void abort(const Failure& failure) override {
      CHECK_EQ(failure.origin_rank, 1);
      if (++num_aborts_ > 1) return;
      std::this_thread::sleep_for(50ms);
      has_aborted_ = true;
    }
    void begin_close() override { CHECK(has_aborted_); }
    void close(Deadline) override {
      if (reporter_.joinable()) reporter_.join();
    }
    std::string describe_peer(int) const override { return ""; }

   private:
    std::atomic<int>& num_aborts_;
    std::atomic<bool> has_aborted_{false};
    std::thread reporter_;
  };
  check::context = "failure during construction";
  std::atomic<int> num_aborts{0};
  Communicator comm(options_of(0, 2), [&](TransportEvents& events) {
    return std::make_unique<Hasty>(events, num_aborts);
  });
  while (num_aborts == 0) std::this_thread::yield();
  CHECK_FAILURE(failure_of([&] { comm.barrier(); }), peer_lost, 1, "(gone)");
  comm.close(nullptr);  // aborts once more, which waits for the first
  CHECK_EQ(num_aborts.load(), 2);
}
