// What others see when one rank ends: closes, aborts, is stopped, or has no memory.

#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <new>

#include "engine/prepared_exchange.h"
#include "meeting.h"
#include "plan/builders.h"
#include "transport/shm/window.h"

using namespace meeting;

namespace {

constexpr size_t kLarge = 1 << 20;
std::atomic<bool> refuses_large{false};
std::atomic<int> num_refused{0};

}  // namespace

void* operator new[](size_t num_bytes) {
  void* const memory = refuses_large && num_bytes >= kLarge ? nullptr : std::malloc(num_bytes);
  if (memory) return memory;
  ++num_refused;
  throw std::bad_alloc();
}
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory, size_t) noexcept { std::free(memory); }

// Must be the first test: no thread of another test exists when it forks. A rank that is stopped while it
// waits for a broadcast still finds the data after the root has aborted and closed.
TEST(a_broadcast_whose_root_is_gone_when_it_is_read) {
  const SameMemory memory(shape_of(2));
  int ready[2];
  CHECK_EQ(pipe(ready), 0);
  const pid_t child = fork();
  if (child == 0) {
    alarm(100);
    auto comm = memory.communicator(1);
    Bytes bytes(40'000);
    wait(*comm, comm->barrier());
    const OperationPtr operation = comm->broadcast(tensor(bytes), 0);
    if (write(ready[1], "x", 1) != 1) _exit(2);
    const bool succeeds = !failure_of(*comm, [&] { return operation; });
    const bool is_right = bytes == coded_bytes(3, bytes.size());
    _exit(succeeds && !is_right ? 1 : 0);
  }
  {
    auto comm = memory.communicator(0);
    wait(*comm, comm->barrier());
    char sign;
    CHECK_EQ(read(ready[0], &sign, 1), 1);
    std::this_thread::sleep_for(200ms);  // it waits
    kill(child, SIGSTOP);
    Bytes bytes = coded_bytes(3, 40'000);
    const OperationPtr operation = comm->broadcast(tensor(bytes), 0);
    std::this_thread::sleep_for(50ms);
    comm->abort("enough");
    comm->close(nullptr);
    kill(child, SIGCONT);
  }
  int status = -1;
  CHECK_EQ(waitpid(child, &status, 0), child);
  CHECK_EQ(status, 0);
  close(ready[0]);
  close(ready[1]);
}

// A child that drops results which it has inherited leaves their memory to its parent.
TEST(a_fork_that_drops_results) {
  shm::WindowPool pool(shm::Segment::create(0, shape_of(2, int64_t{3} << 30)));
  auto kept = pool.allocate(64 << 10);
  auto large = pool.allocate((int64_t{1} << 30) + (1 << 20));
  std::fill_n(kept.get(), 64 << 10, std::byte{0x5a});
  const pid_t child = fork();
  if (child == 0) {
    alarm(100);
    kept.reset();
    large.reset();
    _exit(0);
  }
  int status = -1;
  CHECK_EQ(waitpid(child, &status, 0), child);
  CHECK_EQ(status, 0);
  CHECK(kept.get()[100] == std::byte{0x5a});
}

// Rank 0 posts one batch, of which rank 1 does not agree with its message, and closes. Rank 2 then posts the
// other end of the rest of it: half of that message is in flight, or no part of it.
static void check_rest_of_a_batch(
    const std::function<std::unique_ptr<Communicator>(int rank)>& make, Direction rest,
    size_t num_bytes) {
  std::latch disagree(2);
  run_ranks(3, make, [&](Communicator& comm) {
    Bytes bytes(16), rest_bytes(num_bytes);
    wait(comm, comm.barrier());
    if (comm.rank() == 0) {
      const PointToPoint batch[] = {{Direction::send, 1, 0, tensor(bytes)},
                                    {rest, 2, 0, tensor(rest_bytes)}};
      says(failure_of(comm, [&] { return comm.batch_p2p(batch); }), FailureKind::mismatch,
           "rank 1");
      comm.close(nullptr);
      disagree.count_down();
    } else if (comm.rank() == 1) {
      bytes.resize(17);
      says(failure_of(comm, [&] { return post(comm, Direction::recv, 0, bytes); }),
           FailureKind::mismatch, "rank 0");
      disagree.count_down();
    } else {
      disagree.wait();
      const Direction mine = rest == Direction::send ? Direction::recv : Direction::send;
      for (int turn = 0; turn < 3; ++turn)
        says(failure_of(comm, [&] { return post(comm, mine, 0, rest_bytes); }),
             FailureKind::peer_lost, "has closed its communicator");
      CHECK(!comm.failure());
    }
  });
}

TEST(the_rest_of_a_batch_of_a_rank_that_closes) {
  for (const Direction rest : {Direction::send, Direction::recv})
    for (const size_t num_bytes : {size_t{100}, kLarge}) {
      if (rest == Direction::send && num_bytes == 100) continue;  // it arrives
      check::context =
          (rest == Direction::send ? "send of " : "recv of ") + std::to_string(num_bytes);
      const SameMemory memory(shape_of(3));
      check_rest_of_a_batch([&](int rank) { return memory.communicator(rank); }, rest, num_bytes);
    }
  Meeting meeting(3);
  meeting.over_tcp();
  check_rest_of_a_batch([&](int rank) { return meeting.communicator(rank); }, Direction::send,
                        kLarge);
}

// A close with some patience leaves receives that no rank has matched, but no message that is under way. The other
// ranks continue, and a later message for such a receive fails.
static void check_patient_close(
    const std::function<std::unique_ptr<Communicator>(int rank)>& make) {
  std::latch matched(2), closed(1);
  run_ranks(3, make, [&](Communicator& comm) {
    Bytes bytes(100), more = comm.rank() == 1 ? coded_bytes(1, kLarge) : Bytes(kLarge);
    wait(comm, comm.barrier());
    if (comm.rank() == 0) {
      const OperationPtr first = post(comm, Direction::recv, 2, bytes);  // unmatched
      const OperationPtr second = post(comm, Direction::recv, 1, more);  // late
      matched.count_down();
      comm.close(nullptr, 300ms);
      says(first->failure(), FailureKind::aborted, "was pending when its communicator was closed");
      CHECK(!second->failure() && more == coded_bytes(1, kLarge));
      closed.count_down();
      return;
    }
    if (comm.rank() == 1) {
      matched.arrive_and_wait();
      wait(comm, post(comm, Direction::send, 0, more));
    }
    closed.wait();
    if (comm.rank() == 2)
      says(failure_of(comm, [&] { return post(comm, Direction::send, 0, bytes); }),
           FailureKind::peer_lost, "closed");
    const Direction direction = comm.rank() == 1 ? Direction::send : Direction::recv;
    wait(comm, post(comm, direction, 3 - comm.rank(), bytes));
  });
}

TEST(a_close_with_little_patience) {
  const SameMemory memory(shape_of(3));
  check_patient_close([&](int rank) { return memory.communicator(rank); });
  Meeting meeting(3);
  meeting.over_tcp();
  check_patient_close([&](int rank) { return meeting.communicator(rank); });
}

// A rank closes while more messages wait for its receives than may. Only their sender hears of it.
TEST(a_full_window_of_messages_to_a_rank_that_closes) {
  Meeting meeting(3);
  meeting.over_tcp();
  std::latch posted(1), refused(1);
  run_ranks(meeting, [&](Communicator& comm) {
    wait(comm, comm.barrier());
    if (comm.rank() == 0) {
      posted.wait();
      std::this_thread::sleep_for(100ms);
      comm.close(nullptr);
      return;
    }
    if (comm.rank() == 1) {
      Bytes bytes(32 << 10);
      std::vector<OperationPtr> sends;
      for (int idx = 0; idx < 140; ++idx) sends.push_back(post(comm, Direction::send, 0, bytes));
      posted.count_down();
      for (const OperationPtr& send : sends)
        says(failure_of(comm, [&] { return send; }), FailureKind::peer_lost, "closed");
      refused.count_down();
    }
    refused.wait();
    CHECK(!comm.failure());
  });
}

// A thread that writes to its peer's window returns when its limit has passed, to look for signals.
TEST(a_limit_that_passes_while_data_move) {
  constexpr int64_t kNumBytes = 512 << 20;
  run_ranks(shape_of(2, int64_t{1} << 30), [&](Communicator& comm) {
    const bool sends = comm.rank() == 0;
    const auto window = sends ? nullptr : comm.transport().allocate_result(kNumBytes);
    Bytes bytes(sends ? kNumBytes : 0);
    const PointToPoint one{sends ? Direction::send : Direction::recv,
                           1 - comm.rank(),
                           0,
                           {sends ? bytes.data() : window.get(), kByte, {kNumBytes}, {1}, window}};
    wait(comm, comm.barrier());
    const OperationPtr operation = comm.batch_p2p({&one, 1});
    int num_limits = 0;
    const auto began = Clock::now();
    while (!comm.wait(*operation, Clock::now() + 1ms, nullptr)) ++num_limits;
    if (sends && Clock::now() - began > 300ms) CHECK(num_limits > 1);  // else it was too fast
  });
}

// There is no memory for a copy of messages that wait for their route.
TEST(no_memory_for_messages_that_waited) {
  Meeting meeting(2);
  meeting.over_tcp().over_memory(shape_of(2));
  std::atomic<bool> is_known{false};
  meeting.look_up = [&](int, int peer) -> std::optional<Introduction> {
    if (!is_known) return std::nullopt;
    Introduction introduction = meeting.introductions[peer];
    introduction.pid = 0;
    introduction.memory_fd = -1;
    introduction.reason = "another host";
    return introduction;
  };
  const auto comm = meeting.communicator(0);
  constexpr int64_t kWidth = kLarge;
  const TensorSpec spec{{4, kWidth}, kByte};
  const auto plan = std::make_shared<PreparedExchange>(
      gather_plan({0, 2}, spec, 1, {{{0, kWidth}}, {{kWidth, kWidth}}}));
  Bytes local(4 * kWidth), whole(8 * kWidth);
  const TensorRef input{local.data(), kByte, {4, kWidth}, {kWidth, 1}, nullptr};
  const TensorRef output{whole.data(), kByte, {4, 2 * kWidth}, {2 * kWidth, 1}, nullptr};
  const OperationPtr operation =
      comm->exchange(OpCode::all_gather, plan, {&input, 1}, {&output, 1});
  refuses_large = true;
  is_known = true;
  says(failure_of(*comm, [&] { return operation; }), FailureKind::error, "bad_alloc");
  CHECK(num_refused > 0);
  refuses_large = false;
  comm->close(nullptr);
}
