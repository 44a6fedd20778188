// Exchanges of some ranks: one communicator for all of a channel between the same ranks, one kernel each.

#include "device_exchanges.h"
#include "plan/reshard.h"

int num_comms() {
  std::lock_guard lock(fake::world->mutex);
  return int(fake::world->comms.size());
}
int num_kernels() {
  std::lock_guard lock(fake::world->mutex);
  return fake::world->num_kernels;
}

// Only members ask each other; no other rank takes part.
TEST(members_have_a_communicator) {
  run(options_of(4), [](Rank& me) {
    exchange_within(me, {0, 2, 3});
    meet(me);
    CHECK(num_comms() == 3);
    const int num_before = num_kernels();
    meet(me);
    exchange_within(me, {0, 2, 3});
    meet(me);
    CHECK_EQ(num_kernels() - num_before, 3);  // one on each member
    CHECK(me.comm->execution().device_usage().num_nccl_comms == (me.rank == 1 ? 0 : 1));
    meet(me);
    exchange_within(me, {1, 2});
    exchange_within(me, {0, 1, 2, 3});
    meet(me);
    CHECK_EQ(num_comms(), 3 + 2 + 4);
    meet(me);
  });
}

// Each of three ranks exchanges with the next one, then with the previous one: on one channel this
// is a deadlock, which the fake detects; with a channel for each pair it is not.
TEST(sets_in_orders_that_contradict_each_other) {
  for (const bool share_channel : {true, false}) {
    Options options = options_of(3);
    options.num_channels = 3;
    options.timeout = 600s;
    options.prepare = [&](fake::World& world) { world.expects_stuck = share_channel; };
    run(options, [&](Rank& me) {
      const int next = (me.rank + 1) % 3, before = (me.rank + 2) % 3;
      const Within first = post_within(me, {std::min(me.rank, next), std::max(me.rank, next)},
                                       share_channel ? 0 : me.rank);
      const Within second = post_within(me, {std::min(me.rank, before), std::max(me.rank, before)},
                                        share_channel ? 0 : before);
      if (share_channel) {
        finish_stuck(me, [&] { first.finish(me); });
        return;
      }
      second.finish(me);
      first.finish(me);
    });
  }
}

// Sets of all kinds on several channels, in one order on each channel, with channels and messages
// interleaved differently on each rank: no deadlock, and few thread blocks are enough.
TEST(sets_on_several_channels) {
  for (unsigned seed = 0; seed < unsigned(check::rounds(12)); ++seed) {
    check::context = "sets " + std::to_string(seed);
    Options options = options_of(4);
    options.num_channels = 3;
    options.timeout = 600s;
    options.prepare = [seed](fake::World& world) {
      world.fifo_bytes = seed % 2 ? 1024 : 0;
      world.is_blocking = seed % 3 != 0;
    };
    run(options, [seed](Rank& me) {
      std::mt19937 shared(seed), own(100 * seed + unsigned(me.rank));
      std::array<std::deque<std::vector<int>>, 3> sets;  // by channel
      for (int step = 0; step < 18; ++step) {
        std::vector<int> members;
        const unsigned drawn = 3 + shared() % 13;
        for (int rank = 0; rank < 4; ++rank)
          if (drawn >> rank & 1) members.push_back(rank);
        const bool takes_part = std::ranges::find(members, me.rank) != members.end();
        if (members.size() > 1 && takes_part) sets[size_t(step % 3)].push_back(members);
      }
      const Tensor mine({4}, float(me.rank)), theirs({4});
      std::vector<Within> posted;
      std::vector<PointToPoint> messages{theirs.from((me.rank + 3) % 4, 1),
                                         mine.to((me.rank + 1) % 4, 1)};
      std::vector<OperationPtr> batches;
      while (
          std::ranges::any_of(sets, [](const auto& of_channel) { return !of_channel.empty(); })) {
        const size_t channel = own() % 3;
        if (own() % 4 == 0 && !messages.empty()) {
          batches.push_back(me.p2p({messages.back()}, true));
          messages.pop_back();
        }
        if (sets[channel].empty()) continue;
        posted.push_back(post_within(me, sets[channel].front(), int(channel)));
        sets[channel].pop_front();
      }
      for (const PointToPoint& message : messages) batches.push_back(me.p2p({message}, true));
      for (const OperationPtr& batch : batches) me.finish(batch);
      for (const Within& within : posted) within.finish(me);
      CHECK(theirs.counts_from(float((me.rank + 3) % 4)));
    });
  }
}

// A rank that does not exchange anything takes part in the link of those within which others do.
TEST(within_a_larger_set) {
  run(options_of(4), [](Rank& me) {
    if (me.rank == 3) return meet(me);
    const std::vector<int> members{0, 1};
    if (me.rank < 2) {
      const TensorSpec spec{{2}, dtypes::kFloat32};
      const Tensor input({2}, float(me.rank)), output({2});
      ExchangePlan plan = all_to_all_single_plan({me.rank, 2}, spec, spec, {1, 1}, {1, 1});
      plan.size = me.size;
      me.finish(me.comm->exchange(OpCode::all_to_all,
                                  std::make_shared<PreparedExchange>(std::move(plan)),
                                  std::vector{input.ref()}, std::vector{output.ref()},
                                  {.is_async = false}, {members, 0, {0, 1, 2}}));
      CHECK((*output.data)[0] == float(me.rank) && (*output.data)[1] == float(me.rank + 1));
    }
    CHECK(comes_true([&] { return me.comm->execution().device_usage().num_nccl_comms == 1; }));
    meet(me);
    CHECK_INVALID("within must be increasing ranks", me.comm->connect(Scope{{0, 1, 2}, 0, {0, 1}}));
  });
}

// ------------------------------------------------------------------------------------------------
// resources of programs

// A stage of ranks one after the other.
std::vector<int> stage_of(int stage, int num_ranks) {
  std::vector<int> ranks(static_cast<size_t>(num_ranks));
  std::iota(ranks.begin(), ranks.end(), stage * num_ranks);
  return ranks;
}

// Moves a tensor that each rank of the source has to each rank of the destination, as a relay does:
// in pieces across, and from all to all within the destination.
void relay(Rank& me, const std::vector<int>& source, const std::vector<int>& destination,
           int channel) {
  const bool sends = std::ranges::find(source, me.rank) != source.end();
  const bool receives = std::ranges::find(destination, me.rank) != destination.end();
  if (!sends && !receives) return;
  std::vector<int> members;
  std::ranges::set_union(source, destination, std::back_inserter(members));
  const int64_t length = 2 * int64_t(destination.size());
  const TensorSpec whole{{length}, dtypes::kFloat32};
  const Tensor given({length}, float(channel)), piece({2}), result({length});
  const auto exchange = [&](ExchangePlan plan, const std::vector<int>& ranks,
                            std::vector<TensorRef> inputs, std::vector<TensorRef> outputs) {
    me.finish(me.comm->exchange(OpCode::relay, std::make_shared<PreparedExchange>(std::move(plan)),
                                inputs, outputs, {.is_async = true}, {ranks, channel, members}));
  };
  const Member member{me.rank, me.size};
  const ShardLayout pieces{destination, {}, false, 0}, whole_ones{destination, {}, true, 0};
  std::vector<TensorRef> inputs, outputs;
  if (sends) inputs.push_back(given.ref());
  if (receives) outputs.push_back(piece.ref());
  exchange(reshard_plan(member, whole, {source, {}, true, 0}, pieces), members, inputs, outputs);
  if (!receives) return;
  exchange(reshard_plan(member, whole, pieces, whole_ones), destination, {piece.ref()},
           {result.ref()});
  CHECK(result.counts_from(float(channel)));
}

// Communicators of the rank that has most, and multicast slots of a host with this many ranks, on
// which NCCL takes one for each communicator that has two of them.
struct Counts {
  int of_a_rank = 0, slots = 0;
};
Counts counts_of(int size, int ranks_per_host, const std::function<void(Rank&)>& program) {
  Counts counts;
  std::mutex mutex;
  Options options = options_of(size, Check::off);
  options.num_channels = 8;
  options.timeout = 120s;
  options.end_limit = 60s;
  options.prepare = [&](fake::World& world) { world.ranks_per_host = ranks_per_host; };
  run(options, [&](Rank& me) {
    program(me);
    meet(me);
    std::lock_guard lock(mutex);
    counts.of_a_rank =
        std::max(counts.of_a_rank, me.comm->execution().device_usage().num_nccl_comms);
    counts.slots = std::max(counts.slots, fake::world->max_slots());
    CHECK(fake::world->max_in_the_making <= kMaxInTheMaking);
  });
  return counts;
}

// Tensors of one element to and from neighbours, each a call of its own.
void send_along(Rank& me, int step, int channel) {
  const int to = me.rank + step, from = me.rank - step;
  const Tensor mine({1}, float(me.rank)), theirs({1});
  std::vector<OperationPtr> posted;
  if (from >= 0 && from < me.size) posted.push_back(me.p2p({theirs.from(from, channel)}, true));
  if (to >= 0 && to < me.size) posted.push_back(me.p2p({mine.to(to, channel)}, true));
  for (const OperationPtr& operation : posted) me.finish(operation);
  if (from >= 0 && from < me.size) CHECK(theirs.counts_from(float(from)));
}

TEST(communicators_and_slots) {
  const auto expect = [](const char* name, Counts counts, int of_a_rank, int most_slots) {
    check::context = name;
    CHECK_EQ(counts.of_a_rank, of_a_rank);
    CHECK(counts.slots <= most_slots);
    std::printf("%s: %d NCCL communicators of a rank, %d multicast slots of a host\n", name,
                counts.of_a_rank, counts.slots);
  };
  const auto one_f_one_b = [](Rank& me) {
    send_along(me, 1, 0);
    send_along(me, -1, 1);
  };
  expect("1F1B, 8 stages", counts_of(8, 8, one_f_one_b), 4, 40);
  expect("1F1B, 16 stages", counts_of(16, 8, one_f_one_b), 4, 40);
  expect("DualPipe, 8 stages",
         counts_of(8, 8,
                   [&](Rank& me) {
                     one_f_one_b(me);
                     send_along(me, -1, 0);
                     send_along(me, 1, 1);
                   }),
         8, 40);
  // Activations and gradients between the first two stages, then between the last two.
  expect("relay, middle stage of 8 to 8 to 8",
         counts_of(24, 8,
                   [](Rank& me) {
                     for (const int first : {0, 1}) {
                       const auto lower = stage_of(first, 8), upper = stage_of(first + 1, 8);
                       relay(me, lower, upper, 2 * first);
                       relay(me, upper, lower, 2 * first + 1);
                     }
                   }),
         4, 40);
  expect("all-to-all of 64", counts_of(64, 8, [](Rank& me) { CHECK(run_uneven(me, dense(64))); }),
         1, 40);
  // These use communicators of pairs, all of which are on one host here, 14 of them on rank 0.
  const auto batch_with_all = [](Rank& me, bool is_star) {
    std::vector<PointToPoint> batch;
    std::vector<Tensor> tensors;
    for (int peer = 0; peer < me.size; ++peer) {
      if (peer == me.rank || (is_star && peer != 0 && me.rank != 0)) continue;
      batch.push_back(tensors.emplace_back(Dims{1}, float(me.rank)).to(peer));
      batch.push_back(tensors.emplace_back(Dims{1}).from(peer));
    }
    me.finish(me.p2p(batch, true));
  };
  expect("batch of 8 ranks with each other",
         counts_of(8, 8, [&](Rank& me) { batch_with_all(me, false); }), 14, 56);
  expect("batch of one rank with 63 peers",
         counts_of(64, 8, [&](Rank& me) { batch_with_all(me, true); }), 126, 40);
}
