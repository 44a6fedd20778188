// The device communicator compares the calls of ranks. After a disagreement all ranks fail, and
// none waits for a deadline.
#include "device_exchanges.h"

// The call may be over on this rank before the others find out.
std::string mismatch_of(Rank& me, const std::function<void()>& call) {
  try {
    call();
  } catch (const PipeCommException& error) {
    CHECK(error.failure()->kind == FailureKind::mismatch);
  }
  const FailurePtr failure = failure_of(me);
  CHECK(failure->kind == FailureKind::mismatch);
  return failure->message;
}

OperationPtr broadcast(Rank& me, int source, int64_t length = 4) {
  return me.comm->broadcast(Tensor({length}, 1).ref(), source, {.is_async = false});
}

// No host waits for another one, whether the collective is new or not.
TEST(new_collectives_do_not_stall) {
  for (const int channel : {0, kCollectiveChannel}) {
    std::atomic<int> num_posted = 0;
    run(options_of(2), [&](Rank& me) {
      if (me.rank == 1) CHECK(comes_true([&] { return num_posted == 4; }));
      std::vector<Within> exchanges;
      for (int turn = 0; turn < 4; ++turn, ++num_posted)
        exchanges.push_back(post_within(me, {0, 1}, channel));
      for (const Within& each : exchanges) each.finish(me);
      meet(me);
      CHECK(!me.comm->failure());
    });
  }
}

// `agreed`: the call of most ranks, and the calls of the one or two that differ.
void expect_mismatch(const Options& options, const Uneven& agreed,
                     const std::map<int, Uneven>& others, const std::vector<std::string>& texts,
                     int num_known = 0) {
  std::barrier meeting(options.size);
  run(options, [&](Rank& me) {
    const auto other = others.find(me.rank);
    for (int turn = 0; turn < num_known; ++turn) CHECK(run_uneven(me, agreed));
    meeting.arrive_and_wait();
    const bool is_full = options.check == Check::full;
    Uneven mine = other == others.end() ? agreed : other->second;
    mine.is_compared_first = is_full && other != others.end();
    const std::string text = mismatch_of(me, [&] { run_uneven(me, mine); });
    for (const std::string& each : texts) CHECK_CONTAINS(text, each);
    CHECK_CONTAINS(text, "all_to_all of float32");
    if (is_full) CHECK_CONTAINS(text, "nothing was transferred between the two");
  });
}

// A pair disagrees about sizes, in groups and on channels of all kinds, when the call is new to all
// or to the pair. One of the sizes may be 0.
TEST(mismatched_sizes) {
  for (const Check check : {Check::first_use, Check::full})
    for (const int size : {2, 3, 9})
      for (const int channel : {1, kCollectiveChannel})
        for (const auto& [sent, wanted] : {std::pair(2, 3), std::pair(0, 2), std::pair(2, 0)})
          for (const int num_known : {0, 3}) {
            Uneven agreed = dense(size);
            agreed.is_list = sent == 2;
            agreed.scope.channel = channel;
            const Uneven sends = with_size(agreed, 0, 1, sent);
            expect_mismatch(options_of(size, check), num_known == 0 ? sends : agreed,
                            {{0, sends}, {1, with_size(agreed, 0, 1, wanted)}},
                            {bytes_text(4 * sent), bytes_text(4 * wanted)}, num_known);
          }
}

// A message between ranks that are not neighbours in the tree, and that only one of them expects.
TEST(messages_that_one_end_does_not_know) {
  constexpr int kFrom = 3, kTo = 6;
  const Uneven without = ring(9), with = with_size(without, kFrom, kTo, 5);
  for (const Check check : {Check::first_use, Check::full}) {
    for (const int believer : {kFrom, kTo})
      expect_mismatch(options_of(9, check), without, {{believer, with}}, {" 0 B", "20 B"});
    // The end that has run it before announces nothing with Check::first_use: the other one does.
    for (const int believer : {kFrom, kTo})
      expect_mismatch(options_of(9, check), with, {{kFrom + kTo - believer, without}},
                      {" 0 B", "20 B"}, 2);
  }
}

TEST(mismatched_dtypes) {
  for (const Check check : {Check::first_use, Check::full}) {
    Uneven agreed = dense(3);
    agreed.is_list = true;
    Uneven other = agreed;
    other.recv_dtype = {3, 4};  // int32
    expect_mismatch(options_of(3, check), agreed, {{2, other}}, {"with other arguments"});
  }
}

// Rank `other` makes another call than the rest.
TEST(different_calls) {
  using Call = std::function<void(Rank&)>;
  const Call first = [](Rank& me) { me.finish(broadcast(me, 0)); };
  const std::vector<std::pair<Call, std::string>> calls{
      {[](Rank& me) { me.finish(broadcast(me, 1)); }, "broadcast of "},
      {[](Rank& me) { me.finish(broadcast(me, 0, 7)); }, "float32[7]"},
      {[](Rank& me) { run_uneven(me, ring(me.size)); }, "all_to_all of "},
      {[](Rank& me) { meet(me); }, "barrier"}};
  for (const Check check : {Check::first_use, Check::full})
    for (const int size : {2, 5})
      for (const int other : {0, size - 1})
        for (const auto& [second, text] : calls) {
          std::barrier meeting(size);
          run(options_of(size, check), [&](Rank& me) {
            first(me);
            if (check == Check::full) second(me);  // known to all by then
            meeting.arrive_and_wait();
            const std::string found =
                mismatch_of(me, [&] { (me.rank == other ? second : first)(me); });
            CHECK_CONTAINS(found, text);
            CHECK_CONTAINS(found, "broadcast of float32[4] with a message of ");
          });
        }
}

TEST(different_calls_within_a_group) {
  run(options_of(5), [](Rank& me) {
    const std::vector<int> members{0, 2, 3};
    if (std::ranges::find(members, me.rank) != members.end())
      mismatch_of(me, [&] {
        // The last rank calls it with another pair.
        post_within(me, me.rank == 3 ? std::vector{2, 3} : members, 0).finish(me);
      });
    CHECK_CONTAINS(failure_of(me)->message, "all_to_all of float32");
  });
}

// Members of one communicator, which would get each other's data.
TEST(groups_in_orders_that_contradict_each_other) {
  run(options_of(3), [](Rank& me) {
    const std::vector<int> all{0, 1, 2}, pair{0, 1};
    mismatch_of(me, [&] {
      std::vector<Within> posted;
      for (const bool is_all : {me.rank != 1, me.rank == 1})
        if (is_all || me.rank < 2) posted.push_back(post_within(me, is_all ? all : pair, 0));
      for (const Within& each : posted) each.finish(me);
    });
  });
}

// All ranks fail with the reason, whether they have run that collective before or not. A collective that all
// of them refuse is no disagreement.
TEST(refused_collectives) {
  for (const Check check : {Check::first_use, Check::full, Check::off})
    for (const int size : {2, 5})
      for (const bool is_known : {false, true}) {
        Options options = options_of(size, check);
        options.end_limit = 300ms;
        std::barrier meeting(size);
        run(options, [&](Rank& me) {
          for (int turn = 0; turn < 3 && check != Check::off; ++turn) {
            me.comm->refuse(OpCode::broadcast, "ValueError: on all");
            CHECK(run_uneven(me, dense(size)));
          }
          if (is_known) me.finish(broadcast(me, 1));
          meeting.arrive_and_wait();
          CHECK(!me.comm->failure());
          meeting.arrive_and_wait();
          if (me.rank == 1)
            me.comm->refuse(OpCode::broadcast, "ValueError: bad here");
          else
            mismatch_of(me, [&] { me.finish(broadcast(me, 1)); });
          CHECK_CONTAINS(failure_of(me)->message,
                         "broadcast was refused by rank 1: ValueError: bad here");
          CHECK_EQ(failure_of(me)->origin_rank, 1);
        });
      }
}

// Its replays are not numbered.
TEST(refusals_after_a_capture) {
  Options options = options_of(2);
  options.end_limit = 300ms;
  run(options, [](Rank& me) {
    me.finish(broadcast(me, 0));
    meet(me);
    const fake::GraphPtr graph = capture(me, [&] { me.follow(broadcast(me, 0)); });
    play(me, graph);
    meet(me);
    if (me.rank == 1) me.comm->refuse(OpCode::broadcast, "ValueError: bad here");
    CHECK_CONTAINS(failure_of(me)->message, "refused by rank 1: ValueError: bad here");
  });
}

// With Check::full a call waits for the announcements of its peers.
TEST(announcements_that_do_not_come) {
  const auto swap = [](Rank& me) { me.p2p(Swap(me).on(), false); };
  const auto exchange = [](Rank& me) { run_uneven(me, dense(2)); };
  for (const std::function<void(Rank&)>& call :
       std::vector<std::function<void(Rank&)>>{swap, exchange}) {
    const auto run_alone = [&](Options options, const std::function<void(Rank&)>& alone,
                               const std::function<void(Rank&)>& other) {
      options.check = Check::full;
      options.end_limit = 300ms;
      std::barrier meeting(2);
      run(options, [&](Rank& me) {
        swap(
            me);  // makes the links: a call that is interrupted while it waits for them has begun nothing
        call(me);
        meeting.arrive_and_wait();
        const Clock::time_point begin = Clock::now();
        (me.rank == 0 ? alone : other)(me);
        CHECK(Clock::now() - begin < 15s);
      });
    };
    Options limited = options_of(2);
    limited.timeout = 500ms;
    run_alone(
        limited,
        [&](Rank& me) {
          CHECK_CONTAINS(failure_text(FailureKind::timeout, [&] { call(me); }),
                         "(limit 0.5 s), rank 1 has not announced its part; rank 1 is connected");
        },
        [](Rank& me) { CHECK(failure_of(me)->kind == FailureKind::timeout); });
    run_alone(
        options_of(2),
        [&](Rank& me) {
          CHECK_CONTAINS(failure_text(FailureKind::peer_lost, [&] { call(me); }),
                         "rank 1 has closed its communicator");
        },
        [](Rank& me) { me.comm->close(kNothing); });
    run_alone(
        options_of(2),
        [&](Rank& me) {
          const CallOptions options{.is_async = false,
                                    .interrupted = [] { throw std::runtime_error("Ctrl-C"); }};
          CHECK_THROWS(std::runtime_error, "Ctrl-C", me.comm->batch_p2p(Swap(me).on(), options));
        },
        [](Rank& me) {
          CHECK_CONTAINS(failure_of(me)->message,
                         "p2p was interrupted while it waited for other ranks");
        });
  }
}

// Messages whose ends do not wait: each rank posts first what the other one posts last.
TEST(asynchronous_messages_do_not_wait) {
  run(options_of(2, Check::full), [](Rank& me) {
    const Swap swap(me);
    std::vector<OperationPtr> posted;
    for (const PointToPoint& message : swap.on()) posted.push_back(me.p2p({message}, true));
    std::vector<Within> exchanges;
    for (const int channel : {me.rank, 1 - me.rank})
      exchanges.push_back(post_within(me, {0, 1}, channel));
    for (const OperationPtr& operation : posted) me.finish(operation);
    for (const Within& each : exchanges) each.finish(me);
    CHECK(swap.has_come());
  });
}

// No rank waits for one that does not take part.
TEST(member_sets_overlap) {
  for (const Check check : {Check::first_use, Check::full})
    run(options_of(5, check), [](Rank& me) {
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
    MessageCheck::Posted sent, received;
    ends[0].post(1, Direction::send, describe_length(length), false, sent);
    ends[1].post(0, Direction::recv, describe_length(length), false, received);
    CHECK(sent.announcements.size() == 1 && received.announcements.size() == 1);
    CHECK(!ends[1].receive(0, Direction::send, sent.announcements[0].descriptor));
  }
  int num_known = 0;
  for (int64_t length = 0; length < 20000; ++length) {
    const bool is_known = ends[0].is_known(1, Direction::send, describe_length(length));
    CHECK(is_known == ends[1].is_known(0, Direction::recv, describe_length(length)));
    num_known += is_known;
  }
  CHECK(num_known > 1000 && num_known < 10000);
}

// Either end may be first: a claim that comes before the message is kept until then.
TEST(a_claim_that_comes_first_is_compared) {
  for (const int64_t length : {4, 6}) {
    MessageCheck receiver(2, 1, Check::first_use);
    CHECK(!receiver.receive(0, Direction::send, describe_length(length)));
    MessageCheck::Posted posted;
    receiver.post(0, Direction::recv, describe_length(4), false, posted);
    CHECK_EQ(posted.mismatch.has_value(), length != 4);
  }
}

// A rank that replays a graph and one that posts the same messages number them differently.
TEST(numbers_end_with_a_capture) {
  MessageCheck ends[2] = {{2, 1, Check::first_use}, {2, 1, Check::first_use}};
  Descriptor small = describe_length(4), large = describe_length(6);
  const auto post = [&](int end, const Descriptor& descriptor) {
    const auto direction = end == 0 ? Direction::send : Direction::recv;
    MessageCheck::Posted posted;
    ends[end].post(1 - end, direction, descriptor, false, posted);
    CHECK(!posted.mismatch);
    for (const auto& each : posted.announcements)
      CHECK(!ends[1 - end].receive(end, direction, each.descriptor));
  };
  post(0, small);
  post(1, small);
  MessageCheck::Posted captured;
  for (int turn = 0; turn < 2; ++turn) ends[0].capture(1, Direction::send, small, captured);
  CHECK_EQ(captured.announcements.size(), 1u);
  CHECK(!ends[1].receive(0, Direction::send, captured.announcements[0].descriptor));
  for (int replay = 0; replay < 3; ++replay) post(1, small);
  post(0, large);
  post(1, large);
}
