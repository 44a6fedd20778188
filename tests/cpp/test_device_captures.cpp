// CUDA graphs: calls that can be captured, calls that are refused during a capture, and replays.
#include <barrier>

#include "device_exchanges.h"

TEST(captures) {
  run(options_of(2), [](Rank& me) {
    const int peer = 1 - me.rank;
    const Tensor mine({4}, 1), fresh({9}, 1);
    Tensor theirs({4}), second({4}), shared({4}, 1);
    const std::vector<PointToPoint> batch{mine.to(peer), theirs.from(peer), mine.to(peer, 1),
                                          second.from(peer, 1)};
    me.finish(me.p2p(batch, true));
    const auto in_flight = me.rank == 0 ? me.p2p({theirs.from(peer)}, true) : nullptr;
    me.finish(me.comm->broadcast(shared.ref(), 0, {.is_async = false}));

    meet(me);
    int num_claims = -1;  // once the messages about the calls above have been answered
    while (num_claims != me.hub.num_control()) {
      num_claims = me.hub.num_control();
      std::this_thread::sleep_for(50ms);
    }
    meet(me);
    me.runtime->begin_capture();
    const auto captured = me.p2p(batch, true);  // two channels: forks two streams
    me.follow(captured);                        // and joins them
    me.p2p(batch, false);
    me.follow(me.comm->broadcast(shared.ref(), 0, {.is_async = true}));
    CHECK_INVALID("inside a CUDA graph capture", me.p2p({fresh.to(peer)}));
    CHECK_INVALID("inside a CUDA graph capture",
                  me.comm->broadcast(fresh.ref(), 0, {.is_async = false}));
    if (in_flight) CHECK_INVALID("wait before the capture", me.follow(in_flight));
    me.runtime->end_capture();
    meet(me);
    CHECK_INVALID("captured in a CUDA graph", me.comm->is_completed(*captured));
    me.follow(captured);
    // Each rank may announce once for each of 6 orders that its numbers are meaningless now.
    CHECK(me.hub.num_control() <= num_claims + 12);
    meet(me);

    me.finish(in_flight ? in_flight : me.p2p({mine.to(peer)}, true));
    CHECK(!me.comm->failure());
  });
}

// Each rank sends a half to itself and one to the other rank.
PreparedExchangePtr halves_plan(const Rank& me) {
  const TensorSpec spec{{8}, dtypes::kFloat32};
  return std::make_shared<PreparedExchange>(
      all_to_all_single_plan({me.rank, 2}, spec, spec, {4, 4}, {4, 4}));
}

// A call on another stream while a capture has joined its lanes: CUDA would break the capture.
TEST(calls_beside_a_capture_are_refused) {
  run(options_of(2), [](Rank& me) {
    const Swap swap(me);
    const Tensor input({8}), output({8}), shared({4}, 1);
    const auto plan = halves_plan(me);
    const std::vector<PointToPoint> batch = swap.on(0), other_channel = swap.on(1);
    const auto exchange = [&](int channel) {
      Scope scope;
      scope.channel = channel;
      return me.comm->exchange(OpCode::all_to_all, plan, std::vector{input.ref()},
                               std::vector{output.ref()}, {.is_async = true}, scope);
    };
    const auto step = [&] {
      for (const OperationPtr& operation :
           {me.p2p(batch, true), exchange(0), exchange(kCollectiveChannel),
            me.comm->broadcast(shared.ref(), 0, {.is_async = true})})
        me.follow(operation);
    };
    step();
    me.finish(me.p2p(other_channel, true));
    meet(me);

    const StreamHandle caller = me.runtime->current_stream(), side = me.runtime->new_stream();
    me.runtime->begin_capture();
    step();
    me.runtime->set_current(side);
    const auto all_refused = [&] {
      const std::string text = "beside a CUDA graph capture, which channel 0 takes part in";
      CHECK_INVALID(text, me.p2p(batch, true));
      CHECK_INVALID(text, me.p2p(batch, false));
      CHECK_INVALID(text, exchange(0));
      CHECK_INVALID("which the collectives take part in", exchange(kCollectiveChannel));
      CHECK_INVALID("which the collectives take part in",
                    me.comm->broadcast(shared.ref(), 0, {.is_async = true}));
    };
    all_refused();
    me.finish(me.p2p(other_channel, true));
    // On a stream of the caller alone, where no lane has to join in.
    me.finish(me.p2p({batch[size_t(me.rank)]}, false));
    capture(me, all_refused);
    me.runtime->set_current(caller);
    step();
    const fake::GraphPtr graph = me.runtime->end_capture();

    for (int attempt = 0; attempt < 3; ++attempt) play(me, graph);
    CHECK(swap.has_come());
    meet(me);
    me.finish(me.p2p(batch, true));
    CHECK(!me.comm->failure());
  });
}

TEST(broken_captures_are_refused) {
  run(options_of(2), [](Rank& me) {
    const Swap swap(me);
    me.finish(me.p2p(swap.on(), true));
    const EventPtr outside = me.runtime->record(me.runtime->current_stream());
    me.runtime->begin_capture();
    me.follow(me.p2p(swap.on(), true));
    CHECK_THROWS(std::runtime_error, "dependency created on uncaptured work",
                 me.runtime->wait(me.runtime->current_stream(), outside));
    for (const bool is_async : {true, false})
      CHECK_INVALID("that an earlier error has broken", me.p2p(swap.on(), is_async));
    me.runtime->end_capture(true);
    meet(me);
    me.finish(me.p2p(swap.on(), true));
    CHECK(swap.has_come() && !me.comm->failure());
  });
}

// A graph that takes in a Work of another one, which the user orders.
TEST(works_of_another_capture) {
  run(options_of(2), [](Rank& me) {
    const Swap swap(me);
    me.finish(me.p2p(swap.on(), true));
    OperationPtr first;
    const fake::GraphPtr graph = capture(me, [&] { me.follow(first = me.p2p(swap.on(), true)); });
    const fake::GraphPtr other = capture(me, [&] {
      me.follow(first);
      me.follow(me.p2p(swap.on(), true));
    });
    play(me, graph);
    play(me, other);
    CHECK(swap.has_come() && !me.comm->failure());
  });
}

Options with_timeout(std::optional<std::chrono::nanoseconds> timeout) {
  Options options = options_of(2);
  options.timeout = timeout;
  return options;
}

// A graph of an exchange of both ranks on two channels and a broadcast.
struct Captured {
  Swap swap;
  Tensor shared{{4}}, input{{8}}, output{{8}};
  fake::GraphPtr graph;

  explicit Captured(Rank& me) : swap(me) {
    const auto step = [&] {
      me.p2p(swap.on(), false);
      me.follow(me.p2p(swap.on(1), true));
      me.follow(me.comm->broadcast(shared.ref(), 0, {.is_async = true}));
      for (const int channel : {0, 1, kCollectiveChannel})
        for (const bool is_async : {true, false})
          me.follow(me.comm->exchange(OpCode::all_to_all, halves_plan(me), std::vector{input.ref()},
                                      std::vector{output.ref()}, {.is_async = is_async},
                                      Scope{{}, channel}));
    };
    step();
    graph = capture(me, step);
    meet(me);
  }
};

TEST(replays_that_a_peer_misses_time_out) {
  for (const bool is_first : {true, false}) {
    Options options = with_timeout(1s);
    options.end_limit = 200ms;
    run(options, [&](Rank& me) {
      const Captured captured(me);
      for (int attempt = 0; !is_first && attempt < 3; ++attempt) play(me, captured.graph);
      meet(me);
      const Clock::time_point began = Clock::now();
      if (me.rank == 0) me.runtime->replay(captured.graph);
      const FailurePtr failure = failure_of(me);
      CHECK(Clock::now() - began >= 1s && Clock::now() - began < 4s);
      CHECK(failure->kind == FailureKind::timeout && failure->origin_rank == 0);
      CHECK(contains(failure->message, "p2p in a replay of a CUDA graph timed out on the device"));
      CHECK(contains(failure->message, "(limit 1.0 s)") &&
            contains(failure->message, " rank 1 of"));
      failure_text(FailureKind::timeout, [&] { me.p2p(captured.swap.on()); });
    });
  }
}

// Longer than busy cores may keep a rank from its part.
constexpr auto kLimit = check::kSanitized ? 5000ms : 3000ms;

// Neither many replays nor rare ones are late, and eager operations count nothing. The ranks meet outside
// of the communicator, whose limit is for the replays alone.
TEST(replays_that_all_join_do_not) {
  std::barrier together(2);
  run(with_timeout(kLimit), [&](Rank& me) {
    const Captured captured(me);
    const Clock::time_point began = Clock::now();
    for (int number = 0; number < 1000 || Clock::now() - began < kLimit + 300ms; ++number) {
      play(me, captured.graph);
      if (number >= 1000) std::this_thread::sleep_for(50ms);
      CHECK(!me.comm->failure());
      if (me.comm->failure()) break;
      together.arrive_and_wait();
    }
    together.arrive_and_drop();
    CHECK(captured.swap.has_come());
  });
  run(with_timeout(kLimit), [](Rank& me) {
    const Captured captured(me);
    for (int number = 0; number < 2; ++number) {
      std::this_thread::sleep_for(kLimit + 150ms);
      meet(me);
      play(me, captured.graph);
    }
    CHECK(!me.comm->failure());
  });
  run(with_timeout(kLimit), [](Rank& me) {
    me.finish(me.p2p(Swap(me).on(), true));
    meet(me);
    CHECK(fake::world->counters.empty());
  });
}

// Without a timeout, and where the device cannot count.
TEST(replays_without_a_deadline) {
  for (const bool can_count : {true, false}) {
    run(with_timeout(can_count ? std::nullopt : std::optional(kLimit)), [&](Rank& me) {
      me.runtime->can_count = can_count;
      const Captured captured(me);
      if (me.rank == 0) me.runtime->replay(captured.graph);
      std::this_thread::sleep_for(can_count ? 800ms : kLimit + 300ms);
      CHECK(!me.comm->failure());
      meet(me);
      if (me.rank == 1) me.runtime->replay(captured.graph);
      const EventPtr end = me.runtime->record(me.runtime->current_stream());
      CHECK(comes_true([&] { return me.runtime->is_done(end); }));
      CHECK(captured.swap.has_come());
    });
  }
}

// The graph keeps counting in memory that is not read any more.
TEST(graphs_outlive_their_communicator) {
  Options options = with_timeout(1s);
  options.end_limit = 200ms;
  run(options, [](Rank& me) {
    const Captured captured(me);
    play(me, captured.graph);
    meet(me);
    me.comm->close(kNothing);
    CHECK(contains(me.comm->execution().end_warning(), "destroy the CUDA graphs"));
    me.comm.reset();
    play(me, captured.graph);
    CHECK(captured.swap.has_come());
  });
}

// NCCL registers memory in a capture, which fails for some memory: the error gives the reason.
TEST(captures_that_nccl_would_spoil) {
  Options options = options_of(2);
  options.capture_problem = "memory in segments";
  run(options, [](Rank& me) {
    const Swap swap(me);
    me.finish(me.p2p(swap.on()));
    me.runtime->begin_capture();
    CHECK_INVALID("p2p inside a CUDA graph capture: memory in segments", me.p2p(swap.on()));
    me.runtime->end_capture();
    meet(me);
    me.finish(me.p2p(swap.on()));
    CHECK(swap.has_come());
  });
}

// An exchange after another operation, in a graph: of the same graph, or that has ended before.
TEST(exchanges_after_others_in_a_graph) {
  Options options = options_of(2);
  options.prepare = [](fake::World& world) { world.fifo_bytes = 1024; };  // a send leaves at once
  run(options, [](Rank& me) {
    const Swap swap(me);
    const Tensor returned({4});
    OperationPtr before;
    const auto there_and_back = [&] {
      before = exchange_swap(me, swap.mine, swap.theirs, 0);
      me.follow(exchange_swap(me, swap.theirs, returned, 1, true, before));
    };
    there_and_back();
    me.finish(before);
    meet(me);
    const OperationPtr in_flight =
        me.rank == 0 ? exchange_swap(me, swap.mine, swap.theirs, 0) : nullptr;
    const fake::GraphPtr graph = capture(me, [&] {
      if (in_flight)
        CHECK_INVALID("after= inside a CUDA graph capture for a exchange that was posted before it",
                      exchange_swap(me, swap.theirs, returned, 1, true, in_flight));
      me.follow(exchange_swap(me, swap.theirs, returned, 1, true, before));
    });
    meet(me);
    me.finish(in_flight ? in_flight : exchange_swap(me, swap.mine, swap.theirs, 0));
    const fake::GraphPtr both = capture(me, there_and_back);
    for (int attempt = 0; attempt < 3; ++attempt) {
      for (const Tensor& tensor : {swap.theirs, returned})
        std::ranges::fill(*tensor.data, float(-1 - attempt));
      meet(me);
      if (me.rank == 1) std::this_thread::sleep_for(20ms);
      play(me, both);
      CHECK(returned.counts_from(float(me.rank)));
    }
    play(me, graph);
    CHECK(!me.comm->failure());
  });
}

// A batch that is refused because one of its messages is new has changed nothing for the others.
TEST(refused_batches_leave_no_trace) {
  std::barrier together(2);
  for (const Check check : {Check::first_use, Check::full})
    run(options_of(2, check), [&](Rank& me) {
      const Swap swap(me);
      const Tensor fresh({9}, 1), wide({2, 4}, 1), tall({4, 2}, 1);
      me.finish(me.p2p(swap.on()));
      meet(me);
      if (me.rank == 0)
        capture(me, [&] {
          CHECK_INVALID("inside a CUDA graph capture",
                        me.p2p({swap.mine.to(1), swap.theirs.from(1), fresh.to(1)}));
        });
      together.arrive_and_wait();
      me.finish(me.p2p(swap.on()));
      meet(me);
      const auto send = [&] { me.finish(me.p2p({me.rank == 0 ? wide.to(1) : tall.from(0)})); };
      try {
        send();
      } catch (const PipeCommException&) {
      }
      CHECK(failure_of(me)->kind == FailureKind::mismatch);
    });
  run(options_of(2), [&](Rank& me) {
    const Swap swap(me);
    me.finish(me.p2p(swap.on()));
    meet(me);
    if (me.rank == 0)
      capture(me, [&] {
        CHECK_INVALID("inside a CUDA graph capture",
                      me.p2p({swap.mine.to(1), Tensor({9}, 1).to(1)}));
      });
    together.arrive_and_wait();
    if (me.rank == 1) return;  // closes in order, after as many messages as it has announced
    std::this_thread::sleep_for(300ms);
    CHECK(!me.comm->failure());
  });
}

// The handle of a captured operation may be dropped; its memory is the graph's until the capture ends,
// and then the pool's of the graph.
TEST(dropped_handles_in_a_graph) {
  run(options_of(2), [](Rank& me) {
    const Tensor whole({8}, 1), plain({4}, 50);
    const Tensor got({4}), more({4});
    PointToPoint strided = whole.to(1);
    strided.tensor.shape = {4};
    strided.tensor.strides = {2};
    std::weak_ptr<void> temporary;
    const auto step = [&] {
      const Tensor third({4}, 60);
      temporary = third.data;
      me.p2p({me.rank == 0 ? strided : got.from(0)}, true);
      me.p2p({me.rank == 0 ? third.to(1) : more.from(0)}, true);
      me.follow(me.p2p({me.rank == 0 ? plain.to(1) : more.from(0)}, true));  // joins the lane
    };
    step();
    meet(me);
    const fake::GraphPtr graph = capture(me, [&] {
      step();
      me.p2p({});
      CHECK(me.rank == 1 || !temporary.expired());
    });
    CHECK(comes_true([&] { return temporary.expired(); }));
    meet(me);
    std::ranges::fill(*got.data, -1.0f);
    if (me.rank == 1) std::this_thread::sleep_for(20ms);  // the send of rank 0 waits
    play(me, graph);
    if (me.rank == 1)
      for (int idx = 0; idx < 4; ++idx) CHECK_EQ((*got.data)[size_t(idx)], float(1 + 2 * idx));
    meet(me);
  });
}

// After a wait within the capture, later work of the graph may have the memory.
TEST(memory_of_awaited_operations_in_a_graph) {
  run(options_of(2), [](Rank& me) {
    const Swap swap(me);
    me.finish(me.p2p(swap.on(), true));
    capture(me, [&] {
      std::weak_ptr<void> temporary;
      {
        const Tensor mine({4}, 1);
        temporary = mine.data;
        me.follow(me.p2p({mine.to(swap.peer), swap.theirs.from(swap.peer)}, true));
      }
      CHECK(temporary.expired());
    });
  });
}
