// Reductions of several threads as ranks: the sums, and the state after a failure in the middle.
#include "engine/reductions.h"

#include "check.h"
#include "plan/reshard.h"
#include "plan/split.h"
#include "thread_ranks.h"

using namespace threads;

namespace {

using Numbers = std::shared_ptr<std::vector<int32_t>>;

Numbers numbers(int64_t length, int rank) {
  auto values = std::make_shared<std::vector<int32_t>>(length);
  for (int64_t idx = 0; idx < length; ++idx) (*values)[idx] = int32_t(idx * 7 + 1000 * rank);
  return values;
}

TensorRef tensor_of(const Numbers& values) {
  return {reinterpret_cast<std::byte*>(values->data()),
          dtypes::kInt32,
          {int64_t(values->size())},
          {1},
          values};
}

int32_t sum_of(int64_t idx, int size) {
  return int32_t(idx * 7 * size + 1000 * size * (size - 1) / 2);
}

// Plans as Python makes them: one, or two for large tensors.
std::vector<PreparedExchangePtr> plans_for(const Communicator& comm, int64_t length,
                                           bool is_large) {
  const Member me{comm.rank(), comm.size()};
  std::vector<int> everybody;
  for (int rank = 0; rank < me.size; ++rank) everybody.push_back(rank);
  const auto prepared = [](ExchangePlan plan) {
    return std::make_shared<PreparedExchange>(std::move(plan));
  };
  const ReshardOptions options{.own_in_place = true};
  const ShardLayout all{everybody, {}, true}, split{everybody, {}, false};
  if (!is_large) {
    const TensorSpec rows{{length * me.size}, dtypes::kInt32};
    return {
        prepared(reshard_plan(me, rows, {everybody, Sizes(me.size, length), false}, all, options))};
  }
  const TensorSpec whole{{length}, dtypes::kInt32};
  return {prepared(collect_pieces_plan(me, whole, split, options)),
          prepared(reshard_plan(me, whole, split, all, options))};
}

}  // namespace

TEST(all_reduce) {
  for (const int size : {2, 3, 5})
    for (const int64_t length : {0, 1, 4, 1000, 50'003})
      for (const bool is_large : {false, true})
        run_ranks(size, kLong, [&](Communicator& comm, int rank) {
          const auto plans = plans_for(comm, length, is_large);
          for (int round = 0; round < 3; ++round) {
            const Numbers mine = numbers(length, rank);
            all_reduce(comm, tensor_of(mine), Reduction::kSum, plans, {}, nullptr);
            for (int64_t idx = 0; idx < length; ++idx) CHECK_EQ((*mine)[idx], sum_of(idx, size));
          }
        });
}

// The last one into its own piece of the input.
TEST(reduce_scatter) {
  constexpr int kSize = 3;
  constexpr int64_t kPiece = 2001;
  run_ranks(kSize, kLong, [&](Communicator& comm, int rank) {
    const auto plan = plans_for(comm, kSize * kPiece, true)[0];
    for (const bool in_place : {false, true}) {
      const Numbers whole = numbers(kSize * kPiece, rank);
      const Numbers apart = numbers(kPiece, 0);
      TensorRef piece = tensor_of(apart);
      if (in_place) {
        piece.data = reinterpret_cast<std::byte*>(whole->data() + rank * kPiece);
        piece.storage = whole;
      }
      reduce_scatter(comm, piece, tensor_of(whole), Reduction::kSum, plan, nullptr);
      const auto* const found = reinterpret_cast<const int32_t*>(piece.data);
      for (int64_t idx = 0; idx < kPiece; ++idx)
        CHECK_EQ(found[idx], sum_of(rank * kPiece + idx, kSize));
    }
  });
}

// Rank 2 refuses the first exchange, or is gone before the second one.
TEST(failures_in_the_middle) {
  constexpr int kSize = 3;
  constexpr int64_t kLength = 30'000;
  run_ranks(kSize, kLong, [&](Communicator& comm, int rank) {
    const auto plans = plans_for(comm, kLength, true);
    const Numbers mine = numbers(kLength, rank);
    if (rank == 2) {
      wait(comm, comm.refuse(OpCode::all_reduce, "not today"));
    } else {
      const Failure failure = failure_of(
          [&] { all_reduce(comm, tensor_of(mine), Reduction::kSum, plans, {}, nullptr); });
      CHECK_FAILURE(failure, mismatch, 2, "not today");
    }
    const Numbers again = numbers(kLength, rank);  // the communicator goes on
    all_reduce(comm, tensor_of(again), Reduction::kSum, plans, {}, nullptr);
    CHECK_EQ((*again)[7], sum_of(7, kSize));
    const Numbers last = numbers(kLength, rank);
    if (rank == 2) {
      std::vector<Numbers> rows;
      std::vector<TensorRef> others;
      const auto lengths = remainder_first(kLength, kSize);
      for (int idx = 0; idx < kSize - 1; ++idx) {
        rows.push_back(numbers(lengths[2], 0));
        others.push_back(tensor_of(rows.back()));
      }
      const TensorRef whole = tensor_of(last);
      wait(comm, comm.exchange(OpCode::all_reduce, plans[0], {&whole, 1}, others));
      comm.abort("rank 2 has enough");
    } else {
      const Failure failure = failure_of(
          [&] { all_reduce(comm, tensor_of(last), Reduction::kSum, plans, {}, nullptr); });
      CHECK_FAILURE(failure, aborted, 2, "has enough");
    }
  });
}

// The engine exchanges tensors in host memory, and adds them in its caller.
TEST(there_is_no_operation_that_reduces) {
  run_ranks(2, kLong, [&](Communicator& comm, int rank) {
    const Numbers mine = numbers(4, rank);
    const TensorRef tensor = tensor_of(mine);
    for (const OpCode op : {OpCode::all_reduce, OpCode::all_gather})
      CHECK(!comm.execution().can_reduce(op, Reduction::kSum, tensor.dtype));
    CHECK_THROWS(std::logic_error, "does not reduce tensors in one operation",
                 comm.reduce({OpCode::all_reduce, tensor, tensor}));
    wait(comm, comm.barrier());
  });
}
