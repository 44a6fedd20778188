// The order of calls: programs that run or deadlock, and the cost of a call on the host.

#include "device_exchanges.h"

constexpr int64_t kSmall = 4, kLarge = 5000;  // floats; the FIFO holds 1 KiB

// Posts each in a separate call, all before waiting for any.
void post_and_finish(Rank& me, const std::vector<PointToPoint>& calls) {
  std::vector<OperationPtr> operations;
  for (const PointToPoint& call : calls) operations.push_back(me.p2p({call}, true));
  for (const OperationPtr& operation : operations) me.finish(operation);
}

enum class Order { recv_first, send_first, mixed };

// Every rank sends to the next one and receives from the previous one, and the reverse, in separate
// calls on one channel.
TEST(rings) {
  for (const int size : {2, 3, 4}) {
    Options options = options_of(size);
    options.prepare = [](fake::World& world) { world.fifo_bytes = 1024; };
    for (const Order order : {Order::recv_first, Order::send_first, Order::mixed}) {
      for (const int64_t length : {kSmall, kLarge}) {
        run(options, [&](Rank& me) {
          const bool recv_first =
              order == Order::recv_first || (order == Order::mixed && me.rank % 2);
          for (const int step : {1, size - 1}) {
            const int next = (me.rank + step) % size, prev = (me.rank + size - step) % size;
            const Tensor mine({length}, float(me.rank)), theirs({length});
            std::vector<PointToPoint> calls{mine.to(next), theirs.from(prev)};
            if (recv_first) std::swap(calls[0], calls[1]);
            post_and_finish(me, calls);
            CHECK(theirs.counts_from(float(prev)));
          }
        });
      }
    }
  }
}

// The fake detects a deadlock long before a deadline.
TEST(deadlocks_are_found) {
  Options options = options_of(2);
  options.timeout = 600s;
  options.prepare = [](fake::World& world) { world.expects_stuck = true; };
  run(options, [](Rank& me) {
    const Tensor theirs({4});
    failure_text(FailureKind::aborted,
                 [&] { me.finish(me.p2p({theirs.from(1 - me.rank)}, true)); });
  });
}

// Three ranks send messages upwards, each in another order.
TEST(orders_that_contradict_each_other) {
  for (const int64_t length : {kSmall, kLarge}) {
    run(options_of(3), [&](Rank& me) {
      const Tensor first({length}, 1), second({length}, 2);
      const std::vector<PointToPoint> calls = me.rank == 0 ? std::vector{first.to(2), second.to(1)}
                                              : me.rank == 1
                                                  ? std::vector{first.from(0), second.to(2)}
                                                  : std::vector{first.from(1), second.from(0)};
      post_and_finish(me, calls);
      if (me.rank == 1) CHECK(first.counts_from(2));
      if (me.rank == 2) CHECK(first.counts_from(2) && second.counts_from(1));
    });
  }
}

// Messages with both neighbours on a ring, in all orders of the four calls.
TEST(halo_exchanges) {
  for (const int size : {3, 4}) {
    std::vector<int> order{0, 1, 2, 3};
    do {
      run(options_of(size), [&](Rank& me) {
        const int next = (me.rank + 1) % size, prev = (me.rank + size - 1) % size;
        const Tensor mine({kLarge}, float(me.rank)), from_next({kLarge}), from_prev({kLarge});
        const PointToPoint calls[] = {from_next.from(next), mine.to(next), from_prev.from(prev),
                                      mine.to(prev)};
        std::vector<PointToPoint> ordered;
        for (const int idx : order) ordered.push_back(calls[idx]);
        post_and_finish(me, ordered);
        CHECK(from_next.counts_from(float(next)) && from_prev.counts_from(float(prev)));
      });
    } while (std::next_permutation(order.begin(), order.end()));
  }
}

// A program that all ranks generate from one seed: messages in one global order, cut by operations
// of all ranks. A rank keeps that order between each two ranks on each channel, and is free
// otherwise.
struct Step {
  int source, destination, channel;
  int64_t length;
};

struct Program {
  std::mt19937 random;
  int size;

  int below(int limit) { return int(random() % unsigned(limit)); }
  std::vector<Step> messages() {
    std::vector<Step> steps;
    for (int idx = 0; idx < 12; ++idx) {
      const int source = below(size), shift = 1 + below(size - 1);
      steps.push_back({source, (source + shift) % size, below(2), below(2) ? kSmall : kLarge});
    }
    return steps;
  }
};

float value_of(const Step& step, size_t idx) { return float(100 * step.source + int(idx)); }

struct Sent {
  Tensor tensor;
  float first;
};

// The rank's messages, in the global order as far as it counts, shuffled otherwise.
std::vector<PointToPoint> calls_of(Rank& me, const std::vector<Step>& steps, std::mt19937& own,
                                   std::vector<Sent>& received) {
  std::map<std::tuple<int, int, int>, std::vector<PointToPoint>> lanes;
  for (size_t idx = 0; idx < steps.size(); ++idx) {
    const Step& step = steps[idx];
    if (step.source != me.rank && step.destination != me.rank) continue;
    const bool sends = step.source == me.rank;
    const Tensor tensor({step.length}, sends ? value_of(step, idx) : -1);
    if (!sends) received.push_back({tensor, value_of(step, idx)});
    const int peer = sends ? step.destination : step.source;
    auto& lane = lanes[{step.channel, step.source, step.destination}];
    lane.push_back(sends ? tensor.to(peer, step.channel) : tensor.from(peer, step.channel));
  }
  for (auto& [key, lane] : lanes) std::ranges::reverse(lane);
  std::vector<PointToPoint> calls;
  while (!lanes.empty()) {
    const auto chosen = std::next(lanes.begin(), std::ptrdiff_t(own() % lanes.size()));
    calls.push_back(chosen->second.back());
    chosen->second.pop_back();
    if (chosen->second.empty()) lanes.erase(chosen);
  }
  return calls;
}

void run_collective(Rank& me, Program& program, uint64_t number,
                    std::vector<OperationPtr>& operations) {
  const bool is_async = program.below(2);
  if (program.below(2)) {
    const int source = program.below(me.size);
    const Tensor shared({kSmall}, me.rank == source ? float(number) : -1);
    operations.push_back(me.comm->broadcast(shared.ref(), source, {.is_async = is_async}));
    me.finish(operations.back());
    CHECK(shared.counts_from(float(number)));
    return;
  }
  Scope scope;
  if (const int channel = program.below(3); channel < 2) scope.channel = channel;
  const TensorSpec spec{{me.size * kSmall}, dtypes::kFloat32};
  const Sizes even(me.size, kSmall);
  const auto plan = std::make_shared<PreparedExchange>(
      all_to_all_single_plan({me.rank, me.size}, spec, spec, even, even));
  const Tensor input(spec.shape, float(1000 * me.rank)), output(spec.shape);
  operations.push_back(me.comm->exchange(OpCode::all_to_all, plan, std::vector{input.ref()},
                                         std::vector{output.ref()}, {.is_async = is_async}, scope));
  me.finish(operations.back());
  for (int64_t idx = 0; idx < spec.shape[0]; ++idx)
    CHECK((*output.data)[idx] == float(1000 * (idx / kSmall) + me.rank * kSmall + idx % kSmall));
}

TEST(random_programs) {
  for (unsigned seed = 0; seed < 12; ++seed) {
    Options options = options_of(2 + int(seed % 3));
    options.timeout = 600s;
    check::context = "random program " + std::to_string(seed);
    options.prepare = [seed](fake::World& world) {
      world.fifo_bytes = seed % 2 ? 1024 : 0;
      world.is_blocking = seed % 3 != 0;
    };
    run(options, [seed](Rank& me) {
      Program program{std::mt19937(seed), me.size};
      std::mt19937 own(100 * seed + unsigned(me.rank));
      std::vector<OperationPtr> operations;
      std::vector<Sent> received;
      for (uint64_t part = 0; part < 4; ++part) {
        const std::vector<PointToPoint> calls = calls_of(me, program.messages(), own, received);
        for (size_t begin = 0; begin < calls.size();) {
          const size_t end = std::min(calls.size(), begin + 1 + own() % 3);
          operations.push_back(me.p2p(
              {calls.begin() + std::ptrdiff_t(begin), calls.begin() + std::ptrdiff_t(end)}, true));
          begin = end;
        }
        run_collective(me, program, part, operations);
      }
      for (const OperationPtr& operation : operations) me.finish(operation);
      for (const auto& [tensor, first] : received) CHECK(tensor.counts_from(first));
    });
  }
}

// A launch of NCCL takes time once per group.
TEST(a_batch_on_two_channels_is_one_group) {
  Options options = options_of(2, Check::off);
  run(options, [](Rank& me) {
    const int peer = 1 - me.rank;
    std::vector<Tensor> tensors;
    std::vector<PointToPoint> batch;
    for (int idx = 0; idx < 4; ++idx) {
      batch.push_back(tensors.emplace_back(Dims{kSmall}, 1.f).to(peer, idx % 2));
      batch.push_back(tensors.emplace_back(Dims{kSmall}).from(peer, idx % 2));
    }
    me.finish(me.p2p(batch));  // connects
    const int num_before = fake::world->num_group_ends_of(me.rank);
    for (int attempt = 0; attempt < 100; ++attempt) me.finish(me.p2p(batch, true));
    CHECK(fake::world->num_group_ends_of(me.rank) == num_before + 100);
  });
}

// While another thread launches, this one polls for 200 us before it sleeps.
TEST(polling_comes_before_sleeping) {
  for (const auto launch_cost : {15us, 3000us}) {
    Options options = options_of(2);
    options.prepare = [&](fake::World& world) {
      world.is_blocking = false;
      world.launch_cost = launch_cost;
    };
    run(options, [](Rank& me) {
      const Swap swap(me);
      for (int attempt = 0; attempt < 20; ++attempt) me.finish(me.p2p(swap.on(), true));
      std::lock_guard lock(fake::world->mutex);
      CHECK(fake::world->num_sleeps == 0 || fake::world->shortest_before_sleep >= 200us);
      CHECK(fake::world->launch_cost == 15us || fake::world->num_sleeps > 0);
    });
  }
}

// Each rank posts its receives first, in calls of their own, which fill the device: its sends do not run, and
// the error says why.
TEST(receives_fill_the_device) {
  Options options = options_of(3);
  options.num_channels = 9;
  options.timeout = 2s;
  options.prepare = [](fake::World& world) {
    world.num_multiprocessors = 32;
    world.max_resident = 32;
  };
  run(options, [](Rank& me) {
    me.comm->connect(std::vector{0, 1, 2}, std::vector{0, 1, 2, 3, 4, 5, 6, 7, 8});
    CHECK(comes_true([&] { return me.comm->execution().device_usage().num_nccl_comms == 36; }));
    meet(me);
    const Tensor mine({kLarge}, float(me.rank)), theirs({kLarge});
    try {
      for (const bool sends : {false, true})
        for (int channel = 0; channel < 9; ++channel)
          for (const int step : {1, 2}) {
            const int peer = (me.rank + step) % 3;
            me.p2p({sends ? mine.to(peer, channel) : theirs.from(peer, channel)}, true);
          }
    } catch (const PipeCommException&) {
    }
    CHECK_CONTAINS(failure_of(me)->message, "thread blocks, and the device has 32 multiprocessors");
  });
}

// Few thread blocks for lanes, more within a host, unless the options say so; a minimum alone is legal.
TEST(thread_blocks) {
  struct Case {
    int min_ctas, max_ctas, lane_max, collective_max;
    std::array<uint64_t, 2> hosts;  // of the ranks
  };
  for (const Case& each :
       {Case{-1, -1, 4, -1, {1, 2}}, Case{-1, -1, 16, -1, {1, 1}}, Case{-1, -1, 4, -1, {0, 0}},
        Case{2, -1, 4, 64, {0, 1}}, Case{8, -1, 8, 64, {1, 2}}, Case{2, 20, 20, 20, {1, 1}},
        Case{-1, 2, 2, 2, {1, 1}}}) {
    Options options = options_of(2);
    options.nccl.min_ctas = each.min_ctas;
    options.nccl.max_ctas = each.max_ctas;
    options.hosts = {each.hosts.begin(), each.hosts.end()};
    run(options, [&](Rank& me) {
      const Swap swap(me);
      me.finish(me.p2p(swap.on()));
      me.finish(me.comm->broadcast(swap.theirs.ref(), 0));
      std::lock_guard lock(fake::world->mutex);
      CHECK(fake::world->comms.size() == 6);
      for (const auto& comm : fake::world->comms)
        CHECK(comm->config.max_ctas ==
              (comm->config.name == "pipecomm" ? each.collective_max : each.lane_max));
    });
  }
}

// An exchange sends what the operation before it has received, in whichever orders the two are.
TEST(exchanges_after_others) {
  using First = std::function<OperationPtr(Rank&, const Swap&)>;
  std::vector<First> firsts{[](Rank& me, const Swap& swap) { return me.p2p(swap.on(), true); }};
  for (const int channel : {0, 1, kCollectiveChannel})
    firsts.push_back([channel](Rank& me, const Swap& swap) {
      return exchange_swap(me, swap.mine, swap.theirs, channel);
    });
  Options options = options_of(2);
  options.prepare = [](fake::World& world) { world.fifo_bytes = 1024; };  // a send leaves at once
  run(options, [&](Rank& me) {
    const auto there_and_back = [&](const First& first, bool is_async) {
      const Swap swap(me);
      const Tensor returned({4});
      meet(me);
      if (me.rank == 1) std::this_thread::sleep_for(20ms);
      const OperationPtr one = first(me, swap);
      me.finish(exchange_swap(me, swap.theirs, returned, 1, is_async, one));
      CHECK(returned.counts_from(float(me.rank)));
    };
    for (const First& first : firsts)
      for (const bool is_async : {false, true, false}) there_and_back(first, is_async);
  });
}

// No stream can wait for a barrier of the hosts, so the call does.
TEST(exchanges_after_a_barrier) {
  std::atomic<bool> has_come = false;
  run(options_of(2), [&](Rank& me) {
    const Swap swap(me);
    me.finish(exchange_swap(me, swap.mine, swap.theirs, 1));
    if (me.rank == 1) {
      std::this_thread::sleep_for(100ms);
      has_come = true;
    }
    const OperationPtr met = me.comm->barrier();
    const OperationPtr second = exchange_swap(me, swap.mine, swap.theirs, 1, true, met);
    CHECK(has_come);
    me.finish(second);
  });
}
