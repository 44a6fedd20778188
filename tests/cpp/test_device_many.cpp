// Collectives on devices of groups that are too large for a message between each two ranks: they are
// compared along the tree of the group.

#include "device_exchanges.h"

// More often than they are compared, and with barriers that nobody waits for in between.
TEST(all_collectives) {
  for (const Check check : {Check::first_use, Check::full, Check::off}) {
    for (const int size : {3, 5, 9}) {
      Options options = many_options_of(size, check);
      if (size == 9) options.direct_limit = kDirectLimit;
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

// Two messages for each edge of the tree, and the claims of those that exchange something; nothing
// once ranks have compared it often enough.
TEST(traffic_is_that_of_the_tree) {
  constexpr int kSize = 16, kNumEdges = kSize - 1;
  std::barrier meeting(kSize);
  run(many_options_of(kSize), [&](Rank& me) {
    const auto so_far = [&] {
      meeting.arrive_and_wait();
      const std::pair<int, int> numbers{me.hub.num_messages(), me.hub.num_claims()};
      meeting.arrive_and_wait();
      return numbers;
    };
    const auto expect = [&](int num_messages, int num_claims, const std::function<void()>& call,
                            int num_more = 0) {
      const auto before = so_far();
      call();
      const auto after = so_far();
      CHECK(after.first - before.first == num_messages);
      const int claims = after.second - before.second;
      CHECK(claims >= num_claims && claims <= num_claims + num_more);
    };
    const auto exchange = [&] { CHECK(run_uneven(me, ring(kSize))); };
    // The first one also makes the link of all ranks, along the same edges; invitations cross.
    for (int turn = 0; turn < 8; ++turn)
      expect(2 * kNumEdges, 4 * kSize + (turn == 0 ? 4 * kNumEdges : 0), exchange,
             turn == 0 ? 2 * kNumEdges : 0);
    expect(0, 0, exchange);
    expect(0, 0, exchange);
    // Lengths that are new to a pair: the two claim them.
    const Uneven changed = with_size(ring(kSize), 3, 4, 20);
    expect(0, 2, [&] { CHECK(run_uneven(me, changed)); });
    expect(2 * kNumEdges, 4 * kNumEdges, [&] { broadcast_from(me, 5); });
    meeting.arrive_and_wait();
    CHECK(!me.comm->failure());
    // Each tells the two that it has had messages with of each channel and direction, and takes part
    // in 4 rounds. The source of the broadcast has had some with everybody.
    const auto before = so_far();
    me.comm->close(kNothing);
    const auto after = so_far();
    const int num_pairs = 2 * kSize + 2 * (kSize - 1 - 2);
    CHECK(after.first == before.first);
    CHECK(after.second - before.second == 4 * kSize + num_pairs * 3 * 2);
  });
}

// One rank calls another collective than those that it no longer compares: it waits for them, and
// what it claims tells them.
TEST(another_collective_is_noticed) {
  std::barrier meeting(4);
  run(many_options_of(4), [&](Rank& me) {
    for (int turn = 0; turn < 9; ++turn) broadcast_from(me, 0);
    meeting.arrive_and_wait();
    Tensor tensor({me.rank == 2 ? 7 : 4}, 1);
    try {
      me.finish(me.comm->broadcast(tensor.ref(), 0, {.is_async = false}));
    } catch (const PipeCommException& error) {
      CHECK(error.failure()->kind == FailureKind::mismatch);
    }
    CHECK(contains(failure_of(me)->message, "float32[7]"));
    CHECK(contains(failure_of(me)->message, "float32[4]"));
  });
}

TEST(captures) {
  run(many_options_of(3), [](Rank& me) {
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
