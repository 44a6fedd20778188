// How the device communicator compares what ranks do, when they do something new and when not.
#include "device_exchanges.h"

// rows x columns floats, of which each member gets a part of the columns.
PreparedExchangePtr transpose_plan(Member member, int64_t columns_of_each) {
  const TensorSpec input{{2, columns_of_each * member.size}, dtypes::kFloat32};
  return std::make_shared<PreparedExchange>(
      all_to_all_plan(member, {{input, Sizes(member.size, columns_of_each), Sizes(member.size, 2)}},
                      1, 0, Scale::multiply(1)));
}

OperationPtr transpose(Rank& me, int64_t columns_of_each) {
  const Tensor input({2, columns_of_each * me.size}, float(me.rank));
  const Tensor output({2 * me.size, columns_of_each});
  return me.comm->exchange(OpCode::all_to_all, transpose_plan({me.rank, me.size}, columns_of_each),
                           std::vector{input.ref()}, std::vector{output.ref()}, {.is_async = true});
}

// Lengths that vary do not make one host wait for another one.
TEST(later_signatures_do_not_stall) {
  std::atomic<int> num_posted = 0;
  run(options_of(2), [&](Rank& me) {
    for (int length = 1; length <= 8; ++length) me.finish(transpose(me, length));
    if (me.rank == 1) CHECK(comes_true([&] { return num_posted == 4; }));
    std::vector<OperationPtr> operations;
    for (int length = 11; length <= 14; ++length, ++num_posted)
      operations.push_back(transpose(me, length));
    for (const auto& operation : operations) me.finish(operation);
    me.finish(transpose(me, 11));
    meet(me);
    CHECK(!me.comm->failure());
  });
}

TEST(later_mismatches_reach_everybody) {
  run(options_of(3), [&](Rank& me) {
    for (int length = 1; length <= 8; ++length) me.finish(transpose(me, length));
    try {
      me.finish(transpose(me, me.rank == 1 ? 20 : 21));
    } catch (const PipeCommException& error) {
      CHECK(error.failure()->kind == FailureKind::mismatch);
    }
    CHECK(failure_of(me)->kind == FailureKind::mismatch);
    CHECK_CONTAINS(failure_of(me)->message, "all_to_all of float32");
  });
}

// Groups whose ranks tell each other directly, or along the tree of the group: after how many equal
// calls they no longer compare them.
struct Kind {
  int size, direct_limit, num_compared;
};
constexpr Kind kKinds[] = {{3, kDirectLimit, 1}, {5, 2, 9}};

Options options_of(const Kind& kind, Check check = Check::first_use) {
  Options options = options_of(kind.size, check);
  options.direct_limit = kind.direct_limit;
  return options;
}

// Exchanges that are new to all ranks: refused on all, and the next one works.
void expect_refusal(const Options& options, const Uneven& agreed, int64_t wanted) {
  const int64_t sent = agreed.sizes[0][1];
  run(options, [&](Rank& me) {
    const Uneven mine = me.rank == 1 ? with_size(agreed, 0, 1, wanted) : agreed;
    for (int turn = 0; turn < 2; ++turn) {
      const std::string text = failure_text(FailureKind::mismatch, [&] { run_uneven(me, mine); });
      if (me.rank < 2) CHECK_CONTAINS(text, "all_to_all of float32");
      CHECK_CONTAINS(text, bytes_text(4 * sent));
      CHECK_CONTAINS(text, bytes_text(4 * wanted));
      CHECK_CONTAINS(text, "nothing was transferred");
      if (me.rank > 1)
        CHECK_CONTAINS(text, "rank 0 sends " + bytes_text(4 * sent) + " to rank 1, which expects " +
                                 bytes_text(4 * wanted) + "; nothing");
      CHECK(!me.comm->failure());
    }
    CHECK(run_uneven(me, agreed) && run_uneven(me, agreed) && !me.comm->failure());
  });
}

TEST(mismatched_exchanges) {
  for (const Check check : {Check::first_use, Check::full}) {
    for (const bool is_list : {false, true})
      for (const auto& [sent, wanted] : {std::pair(2, 3), std::pair(3, 2), std::pair(0, 2)})
        expect_refusal(options_of(2, check), {{{1, sent}, {2, 1}}, is_list}, wanted);
    for (const Kind& kind : kKinds)
      for (const bool is_list : {false, true}) {
        Uneven agreed = dense(kind.size);
        agreed.is_list = is_list;
        expect_refusal(options_of(kind, check), agreed, 9);
      }
    run(options_of(3, check), [&](Rank& me) {
      Uneven agreed = dense(3);
      agreed.is_list = true;
      Uneven mine = agreed;
      if (me.rank == 2) mine.recv_dtype = {3, 4};  // int32
      const std::string text = failure_text(FailureKind::mismatch, [&] { run_uneven(me, mine); });
      CHECK(contains(text, "rank") && contains(text, "dtypes"));
      CHECK(!me.comm->failure());
      CHECK(run_uneven(me, agreed));
    });
  }
}

// Two ranks change what they exchange, and disagree. The others have run their part often enough to
// begin at once, so there is no way back: all ranks fail.
void expect_late_mismatch(const Kind& kind, Check check, int64_t wanted) {
  std::barrier meeting(kind.size);
  run(options_of(kind, check), [&](Rank& me) {
    const Uneven agreed = with_size(dense(kind.size), 0, 1, 2);
    for (int turn = 0; turn < kind.num_compared; ++turn) CHECK(run_uneven(me, agreed));
    meeting.arrive_and_wait();
    const Uneven mine = me.rank == 0   ? with_size(agreed, 0, 1, 4)
                        : me.rank == 1 ? with_size(agreed, 0, 1, wanted)
                                       : agreed;
    try {
      run_uneven(me, mine);
      CHECK(me.rank > 1 || kind.direct_limit == 2);  // may be done before the others find out
    } catch (const PipeCommException& error) {
      CHECK(error.failure()->kind == FailureKind::mismatch);
    }
    const FailurePtr failure = failure_of(me);
    CHECK(failure->kind == FailureKind::mismatch);
    CHECK_CONTAINS(failure->message, "16 B");
    CHECK_CONTAINS(failure->message, bytes_text(4 * wanted));
  });
}

TEST(late_mismatches) {
  for (const int64_t wanted : {2, 9}) {  // which rank 1 has seen before, or not
    for (const Kind& kind : kKinds) expect_late_mismatch(kind, Check::first_use, wanted);
    expect_late_mismatch(kKinds[0], Check::full, wanted);
  }
}

// All hear of it, and the next call works, until it has been compared often enough: then the others
// are on the device already.
TEST(refused_collectives) {
  for (const Kind& kind : kKinds) {
    std::barrier meeting(kind.size);
    Options options = options_of(kind);
    options.end_limit = 300ms;
    run(options, [&](Rank& me) {
      const auto broadcast = [&](int64_t length, int source) {
        return me.comm->broadcast(Tensor({length}, 1).ref(), source, {.is_async = false});
      };
      for (int turn = 0; turn < 3; ++turn) {
        if (me.rank == turn)
          me.comm->refuse(OpCode::broadcast, "ValueError: bad here");
        else
          CHECK_CONTAINS(failure_text(FailureKind::mismatch, [&] { broadcast(4, turn); }),
                         "bad here");
        broadcast_from(me, turn);
        const std::string differ = failure_text(
            FailureKind::mismatch, [&] { broadcast(me.rank == kind.size - 1 ? 8 : 6, turn); });
        CHECK_CONTAINS(differ, "broadcast of float32[");
        CHECK(run_uneven(me, dense(kind.size)) && run_uneven(me, ring(kind.size)));
        CHECK(!me.comm->failure());
      }
      for (int turn = 0; turn < kind.num_compared; ++turn) broadcast_from(me, 2);
      meeting.arrive_and_wait();
      if (me.rank == 1) {
        me.comm->refuse(OpCode::broadcast, "ValueError: too late");
      } else {
        try {
          broadcast(4, 2);
        } catch (const PipeCommException& error) {
          CHECK_CONTAINS(error.what(), "too late");  // it was already known
        }
      }
      CHECK_CONTAINS(failure_of(me)->message, "too late");
    });
  }
}

// What pairs of ranks have compared they have compared, whoever else takes part: nobody waits for a
// rank that does not. Few members tell each other directly, many along a tree of their own.
TEST(member_sets_overlap) {
  for (const int direct_limit : {kDirectLimit, 2})
    run(options_of(Kind{5, direct_limit, 0}), [](Rank& me) {
      for (int turn = 0; turn < 10; ++turn)
        for (const std::vector<int>& members : std::vector<std::vector<int>>{
                 {0, 1}, {0, 1, 2, 3, 4}, {1, 2, 4}, {0, 2, 3, 4}, {2, 3}})
          exchange_within(me, members);
      meet(me);
      CHECK(!me.comm->failure());
    });
}

Descriptor describe_length(int64_t length) {
  TensorRef tensor;
  tensor.shape = {length};
  tensor.dtype = dtypes::kFloat32;
  return describe(OpCode::p2p, 0, tensor, 0, 4 * length);
}

// Thousands of descriptions: both ends forget the same ones.
TEST(tables_are_bounded) {
  MessageCheck ends[2] = {{2, 1, Check::first_use}, {2, 1, Check::first_use}};
  for (int64_t length = 0; length < 20000; ++length) {
    Descriptor sent = describe_length(length), received = sent;
    const auto claimed = ends[0].posted(1, Direction::send, sent);
    CHECK(claimed.claim && ends[1].posted(0, Direction::recv, received).claim);
    CHECK(!ends[1].heard(0, Direction::send, sent));
  }
  int num_known = 0;
  for (int64_t length = 0; length < 20000; ++length) {
    const bool is_known = ends[0].is_known(1, Direction::send, describe_length(length));
    CHECK(is_known == ends[1].is_known(0, Direction::recv, describe_length(length)));
    num_known += is_known;
  }
  CHECK(num_known > 1000 && num_known < 10000);
}

// Either end may be the first: what the other one says of its message is kept until then.
TEST(a_claim_that_comes_first_is_compared) {
  for (const int64_t length : {4, 6}) {
    MessageCheck receiver(2, 1, Check::first_use);
    Descriptor received = describe_length(4);
    CHECK(!receiver.heard(0, Direction::send, describe_length(length)));
    const auto posted = receiver.posted(0, Direction::recv, received);
    CHECK_EQ(posted.mismatch.has_value(), length != 4);
  }
}

// A rank that replays a graph and one that posts the same messages number them differently.
TEST(numbers_end_with_a_capture) {
  MessageCheck ends[2] = {{2, 1, Check::first_use}, {2, 1, Check::first_use}};
  Descriptor small = describe_length(4), large = describe_length(6);
  const auto post = [&](int end, Descriptor descriptor) {
    const auto direction = end == 0 ? Direction::send : Direction::recv;
    const auto posted = ends[end].posted(1 - end, direction, descriptor);
    CHECK(!posted.mismatch);
    if (posted.claim) CHECK(!ends[1 - end].heard(end, direction, descriptor));
  };
  post(0, small);
  post(1, small);
  const auto news = ends[0].captured(1, Direction::send, small);
  CHECK(news && !ends[1].heard(0, Direction::send, *news));
  CHECK(!ends[0].captured(1, Direction::send, small));  // once
  for (int replay = 0; replay < 3; ++replay) post(1, small);
  post(0, large);
  post(1, large);
}
