// The end of a device communicator, in every state in which NCCL does not end by itself. Each rank's
// limit for a step is short here; close() must return within a few of them.
#include <barrier>

#include "device_world.h"

namespace {

Options closing_options(int size) {
  Options options = options_of(size);
  options.timeout = 600s;
  options.end_limit = 300ms;
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
  EXPECT(Clock::now() - begin < 30s && me.comm->closed());
  return failure;
}

fake::GraphPtr capture(Rank& me) {
  const Tensor mine({4}, 1), theirs({4});
  const std::vector<PointToPoint> batch{mine.to(1 - me.rank), theirs.from(1 - me.rank)};
  me.finish(me.p2p(batch, true));
  me.runtime->begin_capture();
  me.p2p(batch, false);
  return me.runtime->end_capture();
}

void a_graph_is_alive() {
  std::vector<fake::GraphPtr> graphs(2);
  run("graph alive", closing_options(2), [&](Rank& me) {
    graphs[size_t(me.rank)] = capture(me);
    EXPECT(!close_in_time(me));
    EXPECT(contains(me.comm->end_warning(), "destroy the CUDA graphs"));
  });
  graphs.clear();
  run("graph destroyed", closing_options(2), [&](Rank& me) {
    capture(me);
    meet(me);
    EXPECT(!close_in_time(me));
    EXPECT(me.comm->end_warning().empty());
  });
}

// Even an abort waits for graphs.
void a_graph_is_alive_after_a_failure() {
  std::vector<fake::GraphPtr> graphs(2);
  run("graph and failure", closing_options(2), [&](Rank& me) {
    graphs[size_t(me.rank)] = capture(me);
    meet(me);
    if (me.rank == 0) me.comm->abort("enough");
    failure_of(me);
    close_in_time(me);
    EXPECT(contains(me.comm->end_warning(), "could not be aborted") &&
           contains(me.comm->end_warning(), "destroy the CUDA graphs"));
  });
}

void a_replay_works_until_the_end() {
  run("replay", closing_options(2), [](Rank& me) {
    const int peer = 1 - me.rank;
    const Tensor mine({4}, float(10 * me.rank)), theirs({4});
    const std::vector<PointToPoint> batch{mine.to(peer), theirs.from(peer)};
    me.finish(me.p2p(batch, true));
    me.runtime->begin_capture();
    me.follow(me.p2p(batch, true));
    const fake::GraphPtr graph = me.runtime->end_capture();
    for (int replay = 0; replay < 3; ++replay) {
      std::fill(theirs.data->begin(), theirs.data->end(), -1.f);
      me.runtime->replay(graph);
      const EventPtr end = me.runtime->record(me.runtime->current_stream());
      while (!me.runtime->is_done(end)) std::this_thread::sleep_for(1ms);
      EXPECT(theirs.counts_from(float(10 * peer)));
    }
  });
}

// The other ranks of the node come late, or never.
void a_peer_does_not_close() {
  std::barrier meeting(2);
  run("peer never closes", closing_options(2), [&](Rank& me) {
    const Tensor mine({4}, 1), theirs({4});
    me.finish(me.p2p({mine.to(1 - me.rank), theirs.from(1 - me.rank)}, true));
    if (me.rank == 0) {
      EXPECT(!close_in_time(me));
      EXPECT(me.comm->end_warning().empty());
    }
    meeting.arrive_and_wait();
    if (me.rank == 0) return;
    // Nothing more can be said to it, and that is known at once.
    EXPECT(contains(failure_text(FailureKind::peer_lost, [&] { me.p2p({mine.to(0)}, true); }),
                    "rank 0 has closed"));
    EXPECT(!me.comm->failure());
  });
}

// A message to or from a rank that has closed ends long before the deadline of 600 s. What it has
// posted before it closed arrives.
void messages_to_a_closed_peer_end() {
  for (const bool sends : {false, true}) {
    std::barrier meeting(3);
    run(
        "message to a closed peer", closing_options(3),
        [&](Rank& me) {
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
          EXPECT(second.counts_from(1));
          const std::string text = failure_text(FailureKind::peer_lost, [&] {
            me.finish(me.p2p({sends ? larger_than_fifo.to(0) : tensor.from(0)}, true));
          });
          EXPECT(contains(text, "rank 0 has closed"));
          // If it was refused at once, the communicator goes on.
          if (!me.comm->failure()) me.comm->abort("end of the test");
        },
        nullptr, nullptr, [](fake::World& world) { world.fifo_bytes = 1024; });
  }
}

// Both wait for a message of the other, and both close.
void both_close_with_receives_pending() {
  std::barrier meeting(2);
  run("both pending", closing_options(2), [&](Rank& me) {
    const Tensor theirs({4});
    me.p2p({theirs.from(1 - me.rank)}, true);
    meeting.arrive_and_wait();
    close_in_time(me);
    const FailurePtr failure = me.comm->failure();
    EXPECT(failure && failure->kind == FailureKind::peer_lost);
    EXPECT(failure && contains(failure->message, "has no other end"));
  });
}

// Ctrl-C, while a message is pending or while the peer has not come to close: the communicator is
// aborted, all is released, and the exception goes on.
void a_close_is_interrupted() {
  for (const bool has_pending : {true, false}) {
    std::barrier meeting(2);
    Options options = closing_options(2);
    options.end_limit = 30s;
    run("close interrupted", options, [&](Rank& me) {
      const Tensor mine({4}, 1), theirs({4});
      me.finish(me.p2p({mine.to(1 - me.rank), theirs.from(1 - me.rank)}));
      if (has_pending && me.rank == 0) me.p2p({theirs.from(1)}, true);
      meet(me);
      if (me.rank == 0) {
        const auto begin = Clock::now();
        try {
          me.comm->close([&] {
            if (Clock::now() - begin > 100ms) throw std::runtime_error("Ctrl-C");
          });
          EXPECT(!"close() must throw");
        } catch (const std::runtime_error& error) {
          EXPECT(contains(error.what(), "Ctrl-C"));
        }
        EXPECT(me.comm->closed() && Clock::now() - begin < 20s);
      } else {
        EXPECT(contains(failure_of(me)->message, "its close() was interrupted"));
      }
      meeting.arrive_and_wait();
    });
  }
}

void a_peer_dies() {
  run("peer gone", closing_options(2), [](Rank& me) {
    const Tensor theirs({4});
    if (me.rank == 0) me.p2p({theirs.from(1)}, true);
    meet(me);
    if (me.rank == 1) return me.hub.lose(1);
    failure_of(me);
    close_in_time(me);
    EXPECT(me.comm->end_warning().empty());
  });
}

// The kernel may still write to the tensor: it stays, although nobody else holds it.
void an_abort_is_stuck() {
  for (const bool is_destroyed_only : {false, true}) {
    std::vector<std::weak_ptr<void>> alive(2);
    run(
        "abort stuck", closing_options(2),
        [&](Rank& me) {
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
            EXPECT(contains(me.comm->end_warning(), "could not be aborted"));
          }
          EXPECT(!alive[size_t(me.rank)].expired());
        },
        nullptr, nullptr, [](fake::World& world) { world.abort_is_stuck = true; });
  }
}

// An error of one call ends the rest; nothing is freed twice, which the world reports.
void the_end_of_nccl_fails() {
  for (const char* const failing : {"ncclCommFinalize", "ncclCommDestroy"}) {
    run(
        "end fails", closing_options(2),
        [](Rank& me) {
          const Tensor mine({4}, 1), theirs({4});
          for (const int channel : {0, 1})
            me.finish(me.p2p({mine.to(1 - me.rank, channel), theirs.from(1 - me.rank, channel)}));
          meet(me);
          EXPECT(!close_in_time(me));
        },
        nullptr,
        [failing, num = std::make_shared<std::atomic<int>>(0)](const std::string& call, int rank) {
          return call == failing && rank == 0 && ++*num == 2 ? NcclResult::internal_error
                                                             : NcclResult::success;
        });
  }
}

// A rank that knows nothing of NCCL, or that asks for a link as often as it hears of one, and then does
// not come.
struct Absent final : TransportEvents {
  Absent(fake::Hub& hub, bool asks) : asks_(asks), control_(hub, 1, *this) {}
  void on_peer_lost(int, const std::string&) override {}
  void on_remote_failure(const Failure&) override { has_failed = true; }
  void on_refused(int, const std::string&) override {}
  void on_broken(const std::string&) override {}
  void on_claim(int peer, Direction direction, const Descriptor& claim,
                std::span<const std::byte> note) override {
    if (asks_ && claim.op == OpCode::connect && note.empty())
      control_.claim(peer, direction, claim, {});
  }
  std::atomic<bool> has_failed = false;

 private:
  const bool asks_;
  fake::HubTransport control_;
};

// Rank 1 does not come to NCCL. What rank 0 posts ends at its deadline, and tells rank 1, or at a
// Ctrl-C, after which the communicator goes on. A thread that waits in NCCL is left behind.
void a_rank_does_not_connect() {
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
        EXPECT(!"the call must fail");
      } catch (const std::exception& error) {
        EXPECT(contains(error.what(),
                        is_interrupted ? "Ctrl-C" : "NCCL has not connected this rank and rank 1"));
      }
      EXPECT(is_interrupted ? !comm->failure()
                            : comes_true([&] { return other->has_failed.load(); }));
      try {
        comm->close(kNothing);
      } catch (const PipeCommException&) {
        EXPECT(!is_interrupted);
      }
      EXPECT(Clock::now() - begin < 30s);
      if (!world->finish()) check::fail(__FILE__, __LINE__, "a communicator was leaked");
      EXPECT(world->errors.empty());
      fake::world = nullptr;
    }
  }
}

}  // namespace

int main() {
  a_graph_is_alive();
  a_graph_is_alive_after_a_failure();
  a_replay_works_until_the_end();
  a_peer_does_not_close();
  messages_to_a_closed_peer_end();
  both_close_with_receives_pending();
  a_close_is_interrupted();
  a_peer_dies();
  an_abort_is_stuck();
  the_end_of_nccl_fails();
  a_rank_does_not_connect();
  return check::report("device_close");
}
