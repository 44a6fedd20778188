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
    me.finish(me.comm->broadcast(shared.ref(), 0, false, kNothing));

    meet(me);
    const int num_claims = me.hub.num_claims();
    meet(me);
    me.runtime->begin_capture();
    const auto captured = me.p2p(batch, true);  // two channels: forks two streams
    me.comm->wait(*captured);                   // and joins them
    me.p2p(batch, false);
    me.comm->wait(*me.comm->broadcast(shared.ref(), 0, true, kNothing));
    invalid("inside a CUDA graph capture", [&] { me.p2p({fresh.to(peer)}); });
    invalid("inside a CUDA graph capture",
            [&] { me.comm->broadcast(fresh.ref(), 0, false, kNothing); });
    if (in_flight) invalid("wait before the capture", [&] { me.comm->wait(*in_flight); });
    me.runtime->end_capture();
    meet(me);
    invalid("captured in a CUDA graph", [&] { me.comm->is_completed(*captured); });
    me.comm->wait(*captured);
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
                               std::vector{output.ref()}, true, kNothing, scope);
    };
    const auto step = [&] {
      for (const DeviceOperationPtr& operation :
           {me.p2p(batch, true), exchange(0), exchange(kCollectiveChannel),
            me.comm->broadcast(shared.ref(), 0, true, kNothing)})
        me.comm->wait(*operation);
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
              [&] { me.comm->broadcast(shared.ref(), 0, true, kNothing); });
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
    me.comm->wait(*me.p2p(batch, true));
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
    const DeviceOperationPtr first = me.p2p(batch, true);
    me.comm->wait(*first);
    const fake::GraphPtr graphs[] = {me.runtime->end_capture(), [&] {
                                       me.runtime->begin_capture();
                                       me.comm->wait(*first);
                                       me.comm->wait(*me.p2p(batch, true));
                                       return me.runtime->end_capture();
                                     }()};
    for (const fake::GraphPtr& graph : graphs) play(me, graph);
    EXPECT(theirs.counts_from(float(peer)) && !me.comm->failure());
  });
}

}  // namespace

int main() {
  captures();
  calls_beside_a_capture_are_refused();
  broken_captures_are_refused();
  works_of_another_capture();
  return check::report("device_captures");
}
