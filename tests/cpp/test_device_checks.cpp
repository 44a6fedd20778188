// How the device communicator compares what ranks do, when they do something new and when not.
#include "device_exchanges.h"

namespace {

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
void later_signatures_do_not_stall() {
  std::atomic<int> num_posted = 0;
  run("run ahead", options_of(2), [&](Rank& me) {
    for (int length = 1; length <= 8; ++length) me.finish(transpose(me, length));
    if (me.rank == 1) EXPECT(comes_true([&] { return num_posted == 4; }));
    std::vector<OperationPtr> operations;
    for (int length = 11; length <= 14; ++length, ++num_posted)
      operations.push_back(transpose(me, length));
    for (const auto& operation : operations) me.finish(operation);
    me.finish(transpose(me, 11));
    meet(me);
    EXPECT(!me.comm->failure());
  });
}

void later_mismatches_reach_everybody() {
  run("late mismatch", options_of(3), [&](Rank& me) {
    for (int length = 1; length <= 8; ++length) me.finish(transpose(me, length));
    try {
      me.finish(transpose(me, me.rank == 1 ? 20 : 21));
    } catch (const PipeCommException& error) {
      EXPECT(error.failure()->kind == FailureKind::mismatch);
    }
    EXPECT(failure_of(me)->kind == FailureKind::mismatch);
    EXPECT(contains(failure_of(me)->message, "all_to_all of float32"));
  });
}

// What pairs of ranks have compared they have compared, whoever else takes part: nobody waits for a
// rank that does not.
void member_sets_overlap() {
  run("member sets", options_of(3), [](Rank& me) {
    for (int turn = 0; turn < 2; ++turn)
      for (const std::vector<int>& members :
           std::vector<std::vector<int>>{{0, 1}, {0, 1, 2}, {1, 2}, {0, 2}})
        exchange_within(me, members);
    meet(me);
    EXPECT(!me.comm->failure());
  });
}

Descriptor describe_length(int64_t length) {
  TensorRef tensor;
  tensor.shape = {length};
  tensor.dtype = dtypes::kFloat32;
  return describe(OpCode::p2p, 0, tensor, 0, 4 * length);
}

// Thousands of descriptions: both ends forget the same ones.
void tables_are_bounded() {
  MessageCheck ends[2] = {{2, 1, Check::first_use}, {2, 1, Check::first_use}};
  for (int64_t length = 0; length < 20000; ++length) {
    Descriptor sent = describe_length(length), received = sent;
    const auto claimed = ends[0].posted(1, Direction::send, sent);
    EXPECT(claimed.claim && ends[1].posted(0, Direction::recv, received).claim);
    EXPECT(!ends[1].heard(0, Direction::send, sent));
  }
  int num_known = 0;
  for (int64_t length = 0; length < 20000; ++length) {
    const bool is_known = ends[0].is_known(1, Direction::send, describe_length(length));
    EXPECT(is_known == ends[1].is_known(0, Direction::recv, describe_length(length)));
    num_known += is_known;
  }
  EXPECT(num_known > 1000 && num_known < 10000);
}

// A rank that replays a graph and one that posts the same messages number them differently.
void numbers_end_with_a_capture() {
  MessageCheck ends[2] = {{2, 1, Check::first_use}, {2, 1, Check::first_use}};
  Descriptor small = describe_length(4), large = describe_length(6);
  const auto post = [&](int end, Descriptor descriptor) {
    const auto direction = end == 0 ? Direction::send : Direction::recv;
    const auto posted = ends[end].posted(1 - end, direction, descriptor);
    EXPECT(!posted.mismatch);
    if (posted.claim) EXPECT(!ends[1 - end].heard(end, direction, descriptor));
  };
  post(0, small);
  post(1, small);
  const auto news = ends[0].captured(1, Direction::send, small);
  EXPECT(news && !ends[1].heard(0, Direction::send, *news));
  EXPECT(!ends[0].captured(1, Direction::send, small));  // once
  for (int replay = 0; replay < 3; ++replay) post(1, small);
  post(0, large);
  post(1, large);
}

}  // namespace

int main() {
  later_signatures_do_not_stall();
  later_mismatches_reach_everybody();
  member_sets_overlap();
  tables_are_bounded();
  numbers_end_with_a_capture();
  return check::report("device_checks");
}
