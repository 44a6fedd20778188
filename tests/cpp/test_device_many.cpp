// Collectives on devices of large groups.

#include "device_exchanges.h"

// With barriers in between that no rank waits for.
TEST(all_collectives) {
  for (const Check check : {Check::first_use, Check::full, Check::off}) {
    for (const int size : {3, 5, 9}) {
      Options options = options_of(size, check);
      if (size < 9) options.direct_limit = 2;  // of barriers
      run(options, [](Rank& me) {
        std::vector<OperationPtr> barriers;
        for (int turn = 0; turn < 12; ++turn) {
          CHECK(run_uneven(me, dense(me.size)));
          barriers.push_back(me.comm->barrier());
          CHECK(run_uneven(me, ring(me.size)));
          broadcast_from(me, turn % me.size);
        }
        for (const OperationPtr& barrier : barriers)
          me.comm->wait(*barrier, Clock::now() + 20s, kNothing);
        CHECK(!me.comm->failure());
      });
    }
  }
}

// A rank announces new messages to its neighbours in the tree and to the ranks that it has
// exchanged data with, and announces nothing else.
TEST(traffic_is_that_of_the_tree) {
  constexpr int kSize = 16, kNumEdges = kSize - 1;
  // Pairs of the ring and the tree; some are in both: 0-1, 2-3, ..., 14-15.
  constexpr int kNumPairs = kNumEdges + kSize - kSize / 2;
  std::barrier meeting(kSize);
  Options options = options_of(kSize);
  options.direct_limit = 2;
  run(options, [&](Rank& me) {
    const auto so_far = [&] {
      meeting.arrive_and_wait();
      const int number = me.hub.num_control();
      meeting.arrive_and_wait();
      return number;
    };
    const auto expect = [&](int num_claims, const std::function<void()>& call, int num_more = 0) {
      const int before = so_far();
      call();
      const int claims = so_far() - before;
      CHECK(claims >= num_claims && claims <= num_claims + num_more);
    };
    const auto exchange = [&] { CHECK(run_uneven(me, ring(kSize))); };
    // The first one also makes the link of all ranks, along the same edges; invitations cross.
    expect(4 * kNumPairs + 4 * kNumEdges, exchange, 2 * kNumEdges);
    for (int turn = 0; turn < 3; ++turn) expect(0, exchange);
    // Lengths that are new to a pair: the two announce them.
    const Uneven changed = with_size(ring(kSize), 3, 4, 20);
    expect(2, [&] { CHECK(run_uneven(me, changed)); });
    expect(4 * kNumPairs, [&] { broadcast_from(me, 5); });
    expect(0, [&] { broadcast_from(me, 5); });
    meeting.arrive_and_wait();
    CHECK(!me.comm->failure());
    CHECK_EQ(me.hub.num_messages(), 0);
    // Each tells the two that it has had messages with of each channel and direction, and takes part
    // in 4 rounds. The source of the broadcast has had some with everybody.
    const int before = so_far();
    me.comm->close(kNothing);
    const int num_pairs = 2 * kSize + 2 * (kSize - 1 - 2);
    CHECK(so_far() - before == 4 * kSize + num_pairs * 3 * 2);
  });
}

TEST(captures) {
  run(options_of(3), [](Rank& me) {
    const auto broadcast = [&](int64_t length) {
      Tensor tensor({length}, 1);
      return me.comm->broadcast(tensor.ref(), 0, {.is_async = false});
    };
    me.finish(broadcast(4));
    meet(me);
    me.runtime->begin_capture();
    for (int turn = 0; turn < 10; ++turn) me.follow(broadcast(4));
    CHECK_INVALID("inside a CUDA graph capture", broadcast(9));
    me.runtime->end_capture();
    for (int turn = 0; turn < 3; ++turn) me.finish(broadcast(4));
    me.finish(broadcast(9));
    meet(me);
    CHECK(!me.comm->failure());
  });
}
