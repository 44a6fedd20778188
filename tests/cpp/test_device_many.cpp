// Collectives on devices of groups that are too large for a message between each two ranks: they are
// compared along the tree of the group.
#include <barrier>

#include "device_exchanges.h"

namespace {

// Of which more than two are many.
Options many_options_of(int size, Check check = Check::first_use) {
  Options options = options_of(size, check);
  options.direct_limit = 2;
  return options;
}

Uneven dense(int size) {
  Uneven uneven;
  for (int rank = 0; rank < size; ++rank) {
    Sizes& row = uneven.sizes.emplace_back();
    for (int peer = 0; peer < size; ++peer) row.push_back(1 + (rank * size + peer) % 5);
  }
  return uneven;
}

// Each to the next one.
Uneven ring(int size) {
  Uneven uneven{std::vector<Sizes>(size, Sizes(size, 0))};
  for (int rank = 0; rank < size; ++rank) uneven.sizes[rank][(rank + 1) % size] = 1 + rank;
  return uneven;
}

void broadcast_from(Rank& me, int source, int64_t length = 4) {
  Tensor tensor({length}, me.rank == source ? 50.0f : -1.0f);
  me.finish(me.comm->broadcast(tensor.ref(), source, {.is_async = source % 2 == 1}));
  EXPECT(tensor.counts_from(50));
}

// More often than they are compared, and with barriers that nobody waits for in between.
void all_collectives() {
  for (const Check check : {Check::first_use, Check::full, Check::off}) {
    for (const int size : {3, 5, 9}) {
      Options options = many_options_of(size, check);
      if (size == 9) options.direct_limit = kDirectLimit;
      run("all collectives", options, [](Rank& me) {
        std::vector<OperationPtr> barriers;
        for (int turn = 0; turn < 12; ++turn) {
          EXPECT(run_uneven(me, dense(me.size)));
          barriers.push_back(me.comm->barrier());
          EXPECT(run_uneven(me, ring(me.size)));
          broadcast_from(me, turn % me.size);
        }
        for (const OperationPtr& barrier : barriers)
          me.comm->wait(*barrier, Clock::now() + 20s, kNothing);
        EXPECT(!me.comm->failure());
      });
    }
  }
}

// Two messages for each edge of the tree, and the claims of those that exchange something; nothing
// once ranks have compared it often enough.
void traffic_is_that_of_the_tree() {
  constexpr int kSize = 16, kNumEdges = kSize - 1;
  std::barrier meeting(kSize);
  run("traffic", many_options_of(kSize), [&](Rank& me) {
    const auto so_far = [&] {
      meeting.arrive_and_wait();
      const std::pair<int, int> numbers{me.hub.num_messages(), me.hub.num_claims()};
      meeting.arrive_and_wait();
      return numbers;
    };
    const auto expect = [&](int num_messages, int num_claims, const std::function<void()>& call) {
      const auto before = so_far();
      call();
      const auto after = so_far();
      EXPECT(after.first - before.first == num_messages);
      EXPECT(after.second - before.second == num_claims);
    };
    const auto exchange = [&] { EXPECT(run_uneven(me, ring(kSize))); };
    // The first one also makes the link of all ranks, along the same edges.
    for (int turn = 0; turn < 8; ++turn)
      expect(2 * kNumEdges, 4 * kSize + (turn == 0 ? 4 * kNumEdges : 0), exchange);
    expect(0, 0, exchange);
    expect(0, 0, exchange);
    // Lengths that are new to a pair: the two claim them.
    const Uneven changed = with_size(ring(kSize), 3, 4, 20);
    expect(0, 2, [&] { EXPECT(run_uneven(me, changed)); });
    expect(2 * kNumEdges, 4 * kNumEdges, [&] { broadcast_from(me, 5); });
    meeting.arrive_and_wait();
    EXPECT(!me.comm->failure());
    // Each tells the two that it has had messages with of each channel and direction, and takes part
    // in 4 rounds. The source of the broadcast has had some with everybody.
    const auto before = so_far();
    me.comm->close(kNothing);
    const auto after = so_far();
    const int num_pairs = 2 * kSize + 2 * (kSize - 1 - 2);
    EXPECT(after.first == before.first);
    EXPECT(after.second - before.second == 4 * kSize + num_pairs * 3 * 2);
  });
}

// All of them hear of it, and the next call works.
void mismatches_are_refused_on_all() {
  for (const Check check : {Check::first_use, Check::full}) {
    run("mismatch", many_options_of(5, check), [](Rank& me) {
      for (int turn = 0; turn < 3; ++turn) {
        const Uneven agreed = dense(5);
        const Uneven mine = me.rank == 1 ? with_size(agreed, 0, 1, 9) : agreed;
        const std::string text = failure_text(FailureKind::mismatch, [&] { run_uneven(me, mine); });
        EXPECT(contains(text, "8 B") && contains(text, "36 B"));
        EXPECT(contains(text, "nothing was transferred"));
        if (me.rank > 1) EXPECT(contains(text, "rank 0 sends 8 B to rank 1, which expects 36 B"));
        EXPECT(!me.comm->failure());

        Tensor other({me.rank == 4 ? 8 : 6}, 1);
        const std::string differ = failure_text(FailureKind::mismatch, [&] {
          me.comm->broadcast(other.ref(), 0, {.is_async = false});
        });
        EXPECT(contains(differ, "broadcast of float32[") && contains(differ, "nothing was"));
        EXPECT(run_uneven(me, agreed) && run_uneven(me, ring(5)));
        broadcast_from(me, turn);
        EXPECT(!me.comm->failure());
      }
    });
  }
}

void refusals_are_told_to_all() {
  std::barrier meeting(5);
  run("refusals", many_options_of(5), [&](Rank& me) {
    for (int turn = 0; turn < 3; ++turn) {
      if (me.rank == turn) {
        me.comm->refuse(OpCode::broadcast, "ValueError: bad here");
      } else {
        Tensor tensor({4}, 1);
        const std::string text = failure_text(FailureKind::mismatch, [&] {
          me.comm->broadcast(tensor.ref(), 0, {.is_async = false});
        });
        EXPECT(contains(text, "bad here"));
      }
      broadcast_from(me, turn);
      EXPECT(run_uneven(me, dense(5)));
      EXPECT(!me.comm->failure());
    }
    for (int turn = 0; turn < 9; ++turn) broadcast_from(me, 3);
    meeting.arrive_and_wait();
    // Compared often enough: the others are on the device already.
    if (me.rank == 1) {
      me.comm->refuse(OpCode::broadcast, "ValueError: too late");
    } else {
      Tensor again({4}, 1);
      try {
        me.comm->broadcast(again.ref(), 3, {.is_async = false});
      } catch (const PipeCommException& error) {
        EXPECT(contains(error.what(), "too late"));  // it was already known
      }
    }
    EXPECT(contains(failure_of(me)->message, "too late"));
  });
}

// Ranks no longer compare it before it runs, so there is no way back.
void late_mismatches_reach_everybody() {
  for (const int wanted : {2, 9}) {  // which rank 1 has seen before, or not
    std::barrier meeting(4);
    run("late mismatch", many_options_of(4), [&](Rank& me) {
      const Uneven agreed = with_size(dense(4), 0, 1, 2);
      for (int turn = 0; turn < 9; ++turn) EXPECT(run_uneven(me, agreed));
      meeting.arrive_and_wait();
      const Uneven mine = me.rank == 0   ? with_size(agreed, 0, 1, 4)
                          : me.rank == 1 ? with_size(agreed, 0, 1, wanted)
                                         : agreed;
      try {
        run_uneven(me, mine);
      } catch (const PipeCommException& error) {
        EXPECT(error.failure()->kind == FailureKind::mismatch);
      }
      const FailurePtr failure = failure_of(me);
      EXPECT(failure->kind == FailureKind::mismatch);
      EXPECT(contains(failure->message, "16 B") &&
             contains(failure->message, bytes_text(4 * wanted)));
    });
  }
}

// One rank calls another collective than those that it no longer compares: it waits for them, and
// what it claims tells them.
void another_collective_is_noticed() {
  std::barrier meeting(4);
  run("another collective", many_options_of(4), [&](Rank& me) {
    for (int turn = 0; turn < 9; ++turn) broadcast_from(me, 0);
    meeting.arrive_and_wait();
    Tensor tensor({me.rank == 2 ? 7 : 4}, 1);
    try {
      me.finish(me.comm->broadcast(tensor.ref(), 0, {.is_async = false}));
    } catch (const PipeCommException& error) {
      EXPECT(error.failure()->kind == FailureKind::mismatch);
    }
    EXPECT(contains(failure_of(me)->message, "float32[7]"));
    EXPECT(contains(failure_of(me)->message, "float32[4]"));
  });
}

void captures() {
  run("captures", many_options_of(3), [](Rank& me) {
    const auto refused = [&](const std::function<void()>& call) {
      try {
        call();
        EXPECT(!"std::invalid_argument was expected");
      } catch (const std::invalid_argument& error) {
        EXPECT(contains(error.what(), "inside a CUDA graph capture"));
      }
    };
    const auto broadcast = [&](int64_t length) {
      Tensor tensor({length}, 1);
      return me.comm->broadcast(tensor.ref(), 0, {.is_async = false});
    };
    me.finish(broadcast(4));
    meet(me);
    me.runtime->begin_capture();
    for (int turn = 0; turn < 10; ++turn) me.follow(broadcast(4));
    refused([&] { broadcast(9); });
    me.runtime->end_capture();
    for (int turn = 0; turn < 3; ++turn) me.finish(broadcast(4));
    me.finish(broadcast(9));
    meet(me);
    EXPECT(!me.comm->failure());
  });
}

// Few members tell each other directly, many along a tree of their own.
void member_sets_overlap() {
  run("member sets", many_options_of(5), [](Rank& me) {
    for (int turn = 0; turn < 10; ++turn)
      for (const std::vector<int>& members :
           std::vector<std::vector<int>>{{0, 1}, {0, 1, 2, 3, 4}, {1, 2, 4}, {0, 2, 3, 4}, {2, 3}})
        exchange_within(me, members);
    meet(me);
    EXPECT(!me.comm->failure());
  });
}

}  // namespace

int main() {
  all_collectives();
  traffic_is_that_of_the_tree();
  mismatches_are_refused_on_all();
  refusals_are_told_to_all();
  late_mismatches_reach_everybody();
  another_collective_is_noticed();
  captures();
  member_sets_overlap();
  return check::report("device_many");
}
