// CUDA graphs: what can be captured, what is refused beside a capture, and what replays do.
#include "device_world.h"
#include "plan/builders.h"

namespace {

void invalid(const std::string& text, const std::function<void()>& function) {
  try {
    function();
    EXPECT(!"std::invalid_argument was expected");
  } catch (const std::invalid_argument& error) {
    EXPECT(contains(error.what(), text));
  }
}

// Replays the graph, and waits until it is done.
void play(Rank& me, const fake::GraphPtr& graph) {
  me.runtime->replay(graph);
  const EventPtr end = me.runtime->record(me.runtime->current_stream());
  EXPECT(comes_true([&] { return me.runtime->is_done(end); }));
}

void captures() {
  run("captures", options_of(2), [](Rank& me) {
    const int peer = 1 - me.rank;
    const Tensor mine({4}, 1), fresh({9}, 1);
    Tensor theirs({4}), second({4}), shared({4}, 1);
    const std::vector<PointToPoint> batch{mine.to(peer), theirs.from(peer), mine.to(peer, 1),
                                          second.from(peer, 1)};
    me.finish(me.p2p(batch, true));
    const auto in_flight = me.rank == 0 ? me.p2p({theirs.from(peer)}, true) : nullptr;
    me.finish(me.comm->broadcast(shared.ref(), 0, {.is_async = false}));

    meet(me);
    const int num_claims = me.hub.num_claims();
    meet(me);
    me.runtime->begin_capture();
    const auto captured = me.p2p(batch, true);  // two channels: forks two streams
    me.follow(captured);                        // and joins them
    me.p2p(batch, false);
    me.follow(me.comm->broadcast(shared.ref(), 0, {.is_async = true}));
    invalid("inside a CUDA graph capture", [&] { me.p2p({fresh.to(peer)}); });
    invalid("inside a CUDA graph capture",
            [&] { me.comm->broadcast(fresh.ref(), 0, {.is_async = false}); });
    if (in_flight) invalid("wait before the capture", [&] { me.follow(in_flight); });
    me.runtime->end_capture();
    meet(me);
    invalid("captured in a CUDA graph", [&] { me.comm->is_completed(*captured); });
    me.follow(captured);
    // Each of 6 orders may be told once by each rank that its numbers mean nothing any more.
    EXPECT(me.hub.num_claims() <= num_claims + 12);

    me.finish(in_flight ? in_flight : me.p2p({mine.to(peer)}, true));
    EXPECT(!me.comm->failure());
  });
}

// What each rank sends to itself and to the other one.
PreparedExchangePtr halves_plan(const Rank& me) {
  const TensorSpec spec{{8}, dtypes::kFloat32};
  return std::make_shared<PreparedExchange>(
      all_to_all_single_plan({me.rank, 2}, spec, spec, {4, 4}, {4, 4}));
}

// A call on another stream while a capture has joined its lanes: CUDA would break the capture.
void calls_beside_a_capture_are_refused() {
  run("beside a capture", options_of(2), [](Rank& me) {
    const int peer = 1 - me.rank;
    const Tensor mine({4}, float(me.rank)), theirs({4}), input({8}), output({8});
    const Tensor shared({4}, 1);
    const auto plan = halves_plan(me);
    const std::vector<PointToPoint> batch{mine.to(peer), theirs.from(peer)};
    const std::vector<PointToPoint> other_channel{mine.to(peer, 1), theirs.from(peer, 1)};
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
      invalid(text, [&] { me.p2p(batch, true); });
      invalid(text, [&] { me.p2p(batch, false); });
      invalid(text, [&] { exchange(0); });
      invalid("which the collectives take part in", [&] { exchange(kCollectiveChannel); });
      invalid("which the collectives take part in",
              [&] { me.comm->broadcast(shared.ref(), 0, {.is_async = true}); });
    };
    all_refused();
    me.finish(me.p2p(other_channel, true));
    // On a stream of the caller alone, where no lane has to join in.
    me.finish(me.p2p({me.rank == 0 ? mine.to(peer) : theirs.from(peer)}, false));
    me.runtime->begin_capture();
    all_refused();
    me.runtime->end_capture();
    me.runtime->set_current(caller);
    step();
    const fake::GraphPtr graph = me.runtime->end_capture();

    for (int attempt = 0; attempt < 3; ++attempt) play(me, graph);
    EXPECT(theirs.counts_from(float(peer)));
    meet(me);
    me.finish(me.p2p(batch, true));
    EXPECT(!me.comm->failure());
  });
}

void broken_captures_are_refused() {
  run("broken capture", options_of(2), [](Rank& me) {
    const int peer = 1 - me.rank;
    const Tensor mine({4}, float(me.rank)), theirs({4});
    const std::vector<PointToPoint> batch{mine.to(peer), theirs.from(peer)};
    me.finish(me.p2p(batch, true));
    const EventPtr outside = me.runtime->record(me.runtime->current_stream());
    me.runtime->begin_capture();
    me.follow(me.p2p(batch, true));
    try {
      me.runtime->wait(me.runtime->current_stream(), outside);
      EXPECT(!"the wait must break the capture");
    } catch (const std::runtime_error&) {
    }
    for (const bool is_async : {true, false})
      invalid("that an earlier error has broken", [&] { me.p2p(batch, is_async); });
    me.runtime->end_capture(true);
    meet(me);
    me.finish(me.p2p(batch, true));
    EXPECT(theirs.counts_from(float(peer)) && !me.comm->failure());
  });
}

// A graph that takes in a Work of another one, which the user orders.
void works_of_another_capture() {
  run("two graphs", options_of(2), [](Rank& me) {
    const int peer = 1 - me.rank;
    const Tensor mine({4}, float(me.rank)), theirs({4});
    const std::vector<PointToPoint> batch{mine.to(peer), theirs.from(peer)};
    me.finish(me.p2p(batch, true));
    me.runtime->begin_capture();
    const OperationPtr first = me.p2p(batch, true);
    me.follow(first);
    const fake::GraphPtr graphs[] = {me.runtime->end_capture(), [&] {
                                       me.runtime->begin_capture();
                                       me.follow(first);
                                       me.follow(me.p2p(batch, true));
                                       return me.runtime->end_capture();
                                     }()};
    for (const fake::GraphPtr& graph : graphs) play(me, graph);
    EXPECT(theirs.counts_from(float(peer)) && !me.comm->failure());
  });
}

// ------------------------------------------------------------------------------------------------
// replays

Options with_timeout(std::optional<std::chrono::nanoseconds> timeout) {
  Options options = options_of(2);
  options.timeout = timeout;
  return options;
}

// A graph of an exchange of both ranks on two channels and a broadcast.
struct Captured {
  Tensor mine, theirs{{4}}, shared{{4}}, input{{8}}, output{{8}};
  fake::GraphPtr graph;

  explicit Captured(Rank& me) : mine({4}, float(me.rank)) {
    const int peer = 1 - me.rank;
    const auto step = [&] {
      me.p2p({mine.to(peer), theirs.from(peer)}, false);
      me.follow(me.p2p({mine.to(peer, 1), theirs.from(peer, 1)}, true));
      me.follow(me.comm->broadcast(shared.ref(), 0, {.is_async = true}));
      for (const int channel : {0, 1, kCollectiveChannel})
        for (const bool is_async : {true, false})
          me.follow(me.comm->exchange(OpCode::all_to_all, halves_plan(me), std::vector{input.ref()},
                                      std::vector{output.ref()}, {.is_async = is_async},
                                      Scope{{}, channel}));
    };
    step();
    me.runtime->begin_capture();
    step();
    graph = me.runtime->end_capture();
    meet(me);
  }
};

void replays_that_a_peer_misses_time_out() {
  for (const bool is_first : {true, false}) {
    Options options = with_timeout(1s);
    options.end_limit = 200ms;
    run("missed replay", options, [&](Rank& me) {
      const Captured captured(me);
      for (int attempt = 0; !is_first && attempt < 3; ++attempt) play(me, captured.graph);
      meet(me);
      const Clock::time_point began = Clock::now();
      if (me.rank == 0) me.runtime->replay(captured.graph);
      const FailurePtr failure = failure_of(me);
      EXPECT(Clock::now() - began >= 1s && Clock::now() - began < 4s);
      EXPECT(failure->kind == FailureKind::timeout && failure->origin_rank == 0);
      EXPECT(contains(failure->message, "p2p in a replay of a CUDA graph timed out on the device"));
      EXPECT(contains(failure->message, "(limit 1.0 s)") &&
             contains(failure->message, " rank 1 of"));
      failure_text(FailureKind::timeout, [&] { me.p2p({captured.mine.to(1 - me.rank)}); });
    });
  }
}

// Neither many replays nor rare ones are late, and eager operations count nothing.
void replays_that_all_join_do_not() {
  run("many replays", with_timeout(1s), [](Rank& me) {
    const Captured captured(me);
    const Clock::time_point began = Clock::now();
    for (int number = 0; number < 1000 || Clock::now() - began < 2500ms; ++number) {
      play(me, captured.graph);
      if (number >= 1000) std::this_thread::sleep_for(50ms);
      EXPECT(!me.comm->failure());
      if (me.comm->failure()) break;
      meet(me);
    }
    EXPECT(captured.theirs.counts_from(float(1 - me.rank)));
  });
  run("rare replays", with_timeout(500ms), [](Rank& me) {
    const Captured captured(me);
    for (int number = 0; number < 3; ++number) {
      std::this_thread::sleep_for(800ms);
      meet(me);
      play(me, captured.graph);
    }
    EXPECT(!me.comm->failure());
  });
  run("no replays", with_timeout(1s), [](Rank& me) {
    const Tensor mine({4}), theirs({4});
    me.finish(me.p2p({mine.to(1 - me.rank), theirs.from(1 - me.rank)}, true));
    meet(me);
    EXPECT(fake::world->counters.empty());
  });
}

// Without a timeout, and where the device cannot count.
void replays_without_a_deadline() {
  for (const bool can_count : {true, false}) {
    run("no deadline", with_timeout(can_count ? std::nullopt : std::optional(500ms)),
        [&](Rank& me) {
          me.runtime->can_count = can_count;
          const Captured captured(me);
          if (me.rank == 0) me.runtime->replay(captured.graph);
          std::this_thread::sleep_for(1200ms);
          EXPECT(!me.comm->failure());
          meet(me);
          if (me.rank == 1) me.runtime->replay(captured.graph);
          const EventPtr end = me.runtime->record(me.runtime->current_stream());
          EXPECT(comes_true([&] { return me.runtime->is_done(end); }));
          EXPECT(captured.theirs.counts_from(float(1 - me.rank)));
        });
  }
}

// It goes on counting in memory that nobody looks at any more.
void graphs_outlive_their_communicator() {
  Options options = with_timeout(1s);
  options.end_limit = 200ms;
  run("outlived", options, [](Rank& me) {
    const Captured captured(me);
    play(me, captured.graph);
    meet(me);
    me.comm->close(kNothing);
    EXPECT(contains(me.comm->end_warning(), "destroy the CUDA graphs"));
    me.comm.reset();
    play(me, captured.graph);
    EXPECT(captured.theirs.counts_from(float(1 - me.rank)));
  });
}

}  // namespace

int main() {
  captures();
  calls_beside_a_capture_are_refused();
  broken_captures_are_refused();
  works_of_another_capture();
  replays_that_a_peer_misses_time_out();
  replays_that_all_join_do_not();
  replays_without_a_deadline();
  graphs_outlive_their_communicator();
  return check::report("device_captures");
}
