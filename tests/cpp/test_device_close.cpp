// The end of a device communicator, in every state in which NCCL does not end by itself. Each rank's
// limit for a step is short here; close() must return within a few of them.

#include "device_world.h"
#include "listener.h"

Options closing_options(int size) {
  Options options = options_of(size);
  options.timeout = 600s;
  options.end_limit = 300ms;
  options.host = 1;  // of all: no message waits on the way
  return options;
}

// The failure of close(), if it throws one. A limit of 30 s allows for a machine that stands still.
FailurePtr close_in_time(Rank& me) {
  const auto begin = Clock::now();
  FailurePtr failure;
  try {
    me.comm->close(kNothing);
  } catch (const PipeCommException& error) {
    failure = error.failure();
  }
  CHECK(Clock::now() - begin < 30s && me.comm->closed());
  return failure;
}

fake::GraphPtr captured_swap(Rank& me) {
  const Swap swap(me);
  me.finish(me.p2p(swap.on(), true));
  return capture(me, [&] { me.p2p(swap.on(), false); });
}

TEST(a_graph_is_alive) {
  std::vector<fake::GraphPtr> graphs(2);
  run(closing_options(2), [&](Rank& me) {
    graphs[size_t(me.rank)] = captured_swap(me);
    CHECK(!close_in_time(me));
    CHECK(contains(me.comm->execution().end_warning(), "destroy the CUDA graphs"));
  });
  graphs.clear();
  run(closing_options(2), [&](Rank& me) {
    captured_swap(me);
    meet(me);
    CHECK(!close_in_time(me));
    CHECK(me.comm->execution().end_warning().empty());
  });
}

// Even an abort waits for graphs.
TEST(a_graph_is_alive_after_a_failure) {
  std::vector<fake::GraphPtr> graphs(2);
  run(closing_options(2), [&](Rank& me) {
    graphs[size_t(me.rank)] = captured_swap(me);
    meet(me);
    if (me.rank == 0) me.comm->abort("enough");
    failure_of(me);
    close_in_time(me);
    CHECK(contains(me.comm->execution().end_warning(), "could not be aborted") &&
          contains(me.comm->execution().end_warning(), "destroy the CUDA graphs"));
  });
}

TEST(a_replay_works_until_the_end) {
  run(closing_options(2), [](Rank& me) {
    const Swap swap(me);
    me.finish(me.p2p(swap.on(), true));
    const auto graph = capture(me, [&] { me.follow(me.p2p(swap.on(), true)); });
    for (int replay = 0; replay < 3; ++replay) {
      std::fill(swap.theirs.data->begin(), swap.theirs.data->end(), -1.f);
      play(me, graph);
      CHECK(swap.has_come());
    }
  });
}

// The other ranks of the node close late, or never.
TEST(a_peer_does_not_close) {
  std::barrier meeting(2);
  run(closing_options(2), [&](Rank& me) {
    const Swap swap(me);
    me.finish(me.p2p(swap.on(), true));
    if (me.rank == 0) {
      CHECK(!close_in_time(me));
      CHECK(me.comm->execution().end_warning().empty());
    }
    meeting.arrive_and_wait();
    if (me.rank == 0) return;
    // No message can reach it any more, and this rank knows that immediately.
    CHECK_CONTAINS(failure_text(FailureKind::peer_lost, [&] { me.p2p({swap.mine.to(0)}, true); }),
                   "rank 0 has closed");
    CHECK(!me.comm->failure());
  });
}

// A message to or from a rank that has closed ends long before the deadline of 600 s. Messages that
// it posted before it closed arrive.
TEST(messages_to_a_closed_peer_end) {
  Options options = closing_options(3);
  options.prepare = [](fake::World& world) { world.fifo_bytes = 1024; };
  for (const bool sends : {false, true}) {
    std::barrier meeting(3);
    run(options, [&](Rank& me) {
      const Tensor tensor({4}, 1), second({4}), larger_than_fifo({1024});
      if (me.rank == 0) {
        const OperationPtr sent = me.p2p({tensor.to(1, 1)}, true);
        meeting.arrive_and_wait();
        me.finish(sent);
        close_in_time(me);
        return;
      }
      meeting.arrive_and_wait();
      if (me.rank == 2) {
        failure_of(me);
        return;
      }
      me.finish(me.p2p({second.from(0, 1)}, true));
      CHECK(second.counts_from(1));
      const std::string text = failure_text(FailureKind::peer_lost, [&] {
        me.finish(me.p2p({sends ? larger_than_fifo.to(0) : tensor.from(0)}, true));
      });
      CHECK_CONTAINS(text, "rank 0 has closed");
      // If it was refused at once, the communicator goes on.
      if (!me.comm->failure()) me.comm->abort("end of the test");
    });
  }
}

// Both wait for a message of the other, and both close.
TEST(both_close_with_receives_pending) {
  std::barrier meeting(2);
  run(closing_options(2), [&](Rank& me) {
    const Tensor theirs({4});
    me.p2p({theirs.from(1 - me.rank)}, true);
    meeting.arrive_and_wait();
    close_in_time(me);
    const FailurePtr failure = me.comm->failure();
    CHECK(failure && failure->kind == FailureKind::peer_lost);
    CHECK(failure && contains(failure->message, "has no other end"));
  });
}

// Ctrl-C, while a message is pending or while the peer has not called close(): the communicator is
// aborted, everything is released, and the exception is rethrown.
TEST(a_close_is_interrupted) {
  for (const bool has_pending : {true, false}) {
    std::barrier meeting(2);
    Options options = closing_options(2);
    options.end_limit = 30s;
    run(options, [&](Rank& me) {
      const Swap swap(me);
      me.finish(me.p2p(swap.on()));
      if (has_pending && me.rank == 0) me.p2p({swap.theirs.from(1)}, true);
      meet(me);
      if (me.rank == 0) {
        const auto begin = Clock::now();
        CHECK_THROWS(std::runtime_error, "Ctrl-C", me.comm->close([&] {
          if (Clock::now() - begin > 100ms) throw std::runtime_error("Ctrl-C");
        }));
        CHECK(me.comm->closed() && Clock::now() - begin < 20s);
      } else {
        CHECK(contains(failure_of(me)->message, "its close() was interrupted"));
      }
      meeting.arrive_and_wait();
    });
  }
}

TEST(a_peer_dies) {
  run(closing_options(2), [](Rank& me) {
    const Tensor theirs({4});
    if (me.rank == 0) me.p2p({theirs.from(1)}, true);
    meet(me);
    if (me.rank == 1) return me.hub.lose(1);
    failure_of(me);
    close_in_time(me);
    CHECK(me.comm->execution().end_warning().empty());
  });
}

// The kernel may still write to the tensor, so it is kept although it has no other owner.
TEST(an_abort_is_stuck) {
  Options options = closing_options(2);
  options.prepare = [](fake::World& world) { world.abort_is_stuck = true; };
  for (const bool is_destroyed_only : {false, true}) {
    std::vector<std::weak_ptr<void>> alive(2);
    run(options, [&](Rank& me) {
      {
        const Tensor theirs({4});
        alive[size_t(me.rank)] = theirs.data;
        me.p2p({theirs.from(1 - me.rank)}, true);
      }
      meet(me);
      if (me.rank == 0) me.comm->abort("enough");
      failure_of(me);
      if (is_destroyed_only) {
        me.comm.reset();
      } else {
        close_in_time(me);
        CHECK_CONTAINS(me.comm->execution().end_warning(), "could not be aborted");
      }
      CHECK(!alive[size_t(me.rank)].expired());
    });
  }
}

// A thread is inside a call of NCCL when the communicator fails, since its stream is full of
// waiting kernels: the call returns the error, and nothing is freed before.
TEST(an_abort_under_a_thread_that_posts) {
  Options options = closing_options(2);
  options.prepare = [](fake::World& world) { world.max_queue = 8; };
  run(options, [](Rank& me) {
    const Tensor theirs({4});
    if (me.rank == 0) {
      std::thread poster([&] {
        failure_text(FailureKind::aborted, [&] {
          while (true) me.p2p({theirs.from(1)}, true);
        });
      });
      CHECK(comes_true([&] {
        std::lock_guard lock(fake::world->mutex);
        return std::ranges::any_of(fake::world->streams,
                                   [](const auto& stream) { return stream->tasks.size() >= 8; }) &&
               std::ranges::any_of(fake::world->comms,
                                   [](const auto& comm) { return comm->num_calls > 0; });
      }));
      me.comm->abort("enough");
      poster.join();
    }
    failure_of(me);
    close_in_time(me);
  });
}

// The sender of a small message sees it done when NCCL holds it on the sender's host, and closes; its
// process ends. The receiver, which is busy for longer than a limit of the close, gets it: over a network
// the sender waits for it.
TEST(a_message_outlives_its_sender) {
  for (const bool over_network : {true, false}) {
    Options options = closing_options(2);
    options.timeout = 30s;
    options.hosts = {1, uint64_t(over_network ? 2 : 1)};
    options.prepare = [&](fake::World& world) {
      world.fifo_bytes = 1024;
      world.ranks_per_host = over_network ? 1 : 2;
    };
    run(options, [&](Rank& me) {
      const Tensor tensor({4}, me.rank == 0 ? 7.f : -1.f);
      if (me.rank == 0) {
        me.finish(me.p2p({tensor.to(1)}, true));
        const auto begin = Clock::now();
        CHECK(!close_in_time(me));
        if (!over_network) CHECK(Clock::now() - begin < 1s);
        fake::world->end_process(0);
        return;
      }
      std::this_thread::sleep_for(1500ms);
      me.finish(me.p2p({tensor.from(0)}, true));
      CHECK(tensor.counts_from(7));
    });
  }
}

// A graph holds up the end of the communicators that are part of it, and of no others.
TEST(a_graph_holds_up_its_own) {
  std::vector<fake::GraphPtr> graphs(2);
  run(closing_options(2), [&](Rank& me) {
    const Swap swap(me);
    me.finish(me.p2p(swap.on(1), true));
    graphs[size_t(me.rank)] = captured_swap(me);
    meet(me);
    CHECK(!close_in_time(me));
    const auto num_ended = [] {
      std::lock_guard lock(fake::world->mutex);
      return std::ranges::count(fake::world->comms, true,
                                [](const auto& comm) { return comm->ended; });
    };
    CHECK(comes_true([&] { return num_ended() == 4; }));
  });
  graphs.clear();
}

// An error of one call ends the rest; nothing is freed twice, which the world reports.
TEST(the_end_of_nccl_fails) {
  for (const char* const failing : {"ncclCommFinalize", "ncclCommDestroy"}) {
    Options options = closing_options(2);
    options.inject = [failing, num = std::make_shared<std::atomic<int>>(0)](const std::string& call,
                                                                            int rank) {
      return call == failing && rank == 0 && ++*num == 2 ? NcclResult::internal_error
                                                         : NcclResult::success;
    };
    run(options, [](Rank& me) {
      const Swap swap(me);
      for (const int channel : {0, 1}) me.finish(me.p2p(swap.on(channel)));
      meet(me);
      CHECK(!close_in_time(me));
    });
  }
}

// A rank that does not use NCCL, or that asks for a link whenever it gets a message about one, and
// then does not connect.
struct Absent final : Listener {
  Absent(fake::Hub& hub, bool asks) : asks_(asks), control_(hub, 1, *this) {}
  void on_remote_failure(const Failure&) override { has_failed = true; }
  void on_control(int peer, std::span<const std::byte> bytes) override {
    ControlMessage message = ControlMessage::decoded(bytes);
    if (!asks_ || !message.has_ranks()) return;
    message.kind = ControlMessage::Kind::ask;
    control_.send_control(peer, message.encoded());
  }
  std::atomic<bool> has_failed = false;

 private:
  const bool asks_;
  fake::HubTransport control_;
};

// Rank 1 does not connect to NCCL. The messages of rank 0 end at the deadline, and rank 1 is
// notified, or at a Ctrl-C, after which the communicator still works. A thread that waits in NCCL
// is left behind.
TEST(a_rank_does_not_connect) {
  for (const bool asks : {false, true}) {
    for (const bool is_interrupted : {false, true}) {
      check::context = is_interrupted ? "connecting, interrupted" : "connecting, deadline";
      const auto world = std::make_unique<fake::World>();
      fake::world = world.get();
      const auto hub = std::make_unique<fake::Hub>(2);
      std::unique_ptr<Absent> other;
      std::thread making([&] { other = std::make_unique<Absent>(*hub, asks); });
      Options options = closing_options(2);
      if (!is_interrupted) options.timeout = 200ms;
      const auto comm =
          make_device_communicator(options, options, std::make_shared<fake::Runtime>(),
                                   fake::make_api(), [&](TransportEvents& events) {
                                     return std::make_unique<fake::HubTransport>(*hub, 0, events);
                                   });
      making.join();
      const Tensor tensor({4}, 1);
      const auto begin = Clock::now();
      const auto interrupt = [&] {
        if (is_interrupted && Clock::now() - begin > 100ms) throw std::runtime_error("Ctrl-C");
      };
      try {
        comm->batch_p2p(std::vector{tensor.to(1)}, {.interrupted = interrupt});
        CHECK(!"the call must fail");
      } catch (const std::exception& error) {
        CHECK(contains(error.what(),
                       is_interrupted ? "Ctrl-C" : "NCCL has not connected this rank and rank 1"));
      }
      CHECK(is_interrupted ? !comm->failure()
                           : comes_true([&] { return other->has_failed.load(); }));
      try {
        comm->close(kNothing);
      } catch (const PipeCommException&) {
        CHECK(!is_interrupted);
      }
      CHECK(Clock::now() - begin < 30s);
      if (!world->finish()) check::fail(__FILE__, __LINE__, "a communicator was leaked");
      CHECK(world->errors.empty());
      fake::world = nullptr;
    }
  }
}
