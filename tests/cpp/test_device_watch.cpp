// The device communicator while its work is on the device: it detects ended operations, names the
// rank that is to blame, frees memory, and does nothing in forks.
#include <sys/wait.h>
#include <unistd.h>

#include "device_world.h"

// The exit status of a fork that runs `child`, -1 if it does not end.
int in_fork(const std::function<int()>& child) {
  const pid_t pid = fork();
  if (pid == 0) _exit(child());
  int status = 0;
  const bool ended = comes_true([&] { return waitpid(pid, &status, WNOHANG) != 0; });
  if (!ended) {
    kill(pid, SIGKILL);
    waitpid(pid, &status, 0);
  }
  return ended && WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

// A child has copies of everything, but the GPU, NCCL's memory and the sockets are its parent's.
TEST(forks_leave_the_parent_alone) {
  run(options_of(2), [](Rank& me) {
    Tensor mine({4}, 1), theirs({4});
    meet(me);
    if (me.rank == 0) {
      const OperationPtr pending = me.p2p({theirs.from(1)}, true);
      Communicator& comm = *me.comm;
      const auto is_refused = [](const std::function<void()>& call) {
        try {
          call();
          return false;
        } catch (const PipeCommException& error) {
          return contains(error.what(), "this process was forked");
        }
      };
      std::unique_lock lock(fake::world->mutex);  // no other thread holds it in the child
      const int status = in_fork([&] {
        const int num_asked = fake::world->num_event_queries;
        int wrong = 0;
        wrong |= 1 * !is_refused([&] { comm.batch_p2p(std::vector{mine.to(1)}); });
        wrong |= 2 * !is_refused([&] { comm.follow(*pending, kNothing); });
        wrong |= 4 * !is_refused([&] { comm.wait(*pending, Deadline::max(), kNothing); });
        wrong |= 8 * comm.is_completed(*pending);
        wrong |= 16 * !is_refused([&] { comm.broadcast(mine.ref(), 0, {.is_async = false}); });
        comm.abort("of a child");
        comm.close(kNothing);
        wrong |= 32 * (fake::world->num_aborts > 0);
        wrong |= 64 * (fake::world->num_event_queries > num_asked || !comm.flights().empty());
        return wrong;
      });
      lock.unlock();
      CHECK(status == 0);
      meet(me);
      me.finish(pending);
      CHECK(theirs.counts_from(1) && !me.comm->failure());
    } else {
      meet(me);
      me.finish(me.p2p({mine.to(0)}, true));
    }
  });
}

// NCCL fails a call because a peer died, before the control plane has detected which one.
TEST(dead_peers_are_named_whoever_notices) {
  for (const NcclResult result : {NcclResult::remote_error, NcclResult::system_error}) {
    std::atomic<bool> is_dead = false;
    Options options = options_of(3);
    options.inject = [&](const std::string& call, int) {
      return is_dead && call == "ncclSend" ? result : NcclResult::success;
    };
    run(options, [&](Rank& me) {
      const Tensor tensor({4}, 1);
      meet(me);
      if (me.rank == 2) {
        is_dead = true;
        std::this_thread::sleep_for(100ms);
        return me.hub.lose(2);
      }
      CHECK(comes_true([&] { return is_dead.load(); }));
      failure_text(FailureKind::peer_lost, [&] { me.p2p({tensor.to(2)}, true); });
      CHECK(failure_of(me)->origin_rank == 2);
    });
  }
}

// Another thread holds the driver's lock, behind the very kernel that never ends.
TEST(a_stuck_driver_hides_no_timeout) {
  Options options = options_of(2);
  options.timeout = 1s;
  run(options, [](Rank& me) {
    Tensor tensor({4}, 1);
    meet(me);
    if (me.rank == 0) {
      const OperationPtr operation = me.p2p({tensor.from(1)}, true);
      fake::world->driver_is_stuck = true;
    }
    const FailurePtr failure = failure_of(me);
    CHECK(failure->kind == FailureKind::timeout && failure->origin_rank == 0);
    CHECK(comes_true([] {
      std::lock_guard lock(fake::world->mutex);
      return fake::world->num_aborts > 0;
    }));
    fake::world->driver_is_stuck = false;
  });
}

// Finished sends are released although earlier receives are not done, and without a further call.
TEST(memory_goes_back_without_calls) {
  run(options_of(2), [](Rank& me) {
    constexpr int kNumWaiting = 6;
    std::vector<Tensor> received;
    for (int idx = 0; idx < kNumWaiting; ++idx) received.emplace_back(Dims{4});
    std::weak_ptr<void> sent;
    if (me.rank == 0) {
      for (const Tensor& tensor : received) me.p2p({tensor.from(1, 0)}, true);
      const Tensor mine({4}, 1);
      sent = mine.data;
      me.p2p({mine.to(1, 1)}, true);
    } else {
      Tensor theirs({4});
      me.finish(me.p2p({theirs.from(0, 1)}, true));
    }
    if (me.rank == 0) CHECK(comes_true([&] { return sent.expired(); }));
    meet(me);
    if (me.rank == 1)
      for (const Tensor& tensor : received) me.p2p({tensor.to(0, 0)}, true);
    CHECK(comes_true([&] { return received.back().data.use_count() == 1; }));
  });
}
