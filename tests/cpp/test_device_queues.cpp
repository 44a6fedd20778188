// Limits of CUDA: streams that share a hardware queue block each other, and NCCL may wait for
// kernels of the device while it makes a communicator. Programs of both kinds, in the orders that
// are safe on any device and in those that are not.

#include "device_world.h"

Options with_queues(int size, size_t num_queues, bool expects_stuck = false) {
  Options options = options_of(size);
  options.num_channels = 4;
  options.timeout = 600s;
  options.prepare = [=](fake::World& world) {
    world.num_queues = num_queues;
    world.expects_stuck = expects_stuck;
  };
  return options;
}

// Connects neighbours in both directions on the given channels, before any message.
void connect_with_neighbours(Rank& me, const std::vector<int>& channels) {
  std::vector<int> neighbours;
  for (const int peer : {me.rank - 1, me.rank + 1})
    if (peer >= 0 && peer < me.size) neighbours.push_back(peer);
  me.comm->connect(neighbours, channels);
  const int number = int(2 * neighbours.size() * channels.size());
  CHECK(comes_true([&] { return me.comm->execution().device_usage().num_nccl_comms == number; }));
  meet(me);
}

// The steady state of 1F1B: a rank sends an activation and receives a gradient in one batch, computes, and
// turns round; between batches the device waits, not the host.
void run_1f1b(Rank& me, int num_rounds) {
  const auto is_rank = [&](int rank) { return rank >= 0 && rank < me.size; };
  std::vector<OperationPtr> posted;
  std::vector<Tensor> tensors;
  std::vector<std::pair<Tensor, float>> expected;
  const auto step = [&](int direction, int channel, float value) {
    std::vector<PointToPoint> batch;
    if (is_rank(me.rank - direction)) {
      batch.push_back(tensors.emplace_back(Dims{4}).from(me.rank - direction, channel));
      expected.emplace_back(tensors.back(), value + float(me.rank - direction));
    }
    if (is_rank(me.rank + direction))
      batch.push_back(
          tensors.emplace_back(Dims{4}, value + float(me.rank)).to(me.rank + direction, channel));
    posted.push_back(me.p2p(batch, true));
    me.follow(posted.back());
  };
  for (int round = 0; round < num_rounds; ++round) {
    step(1, 0, float(100 * round));
    step(-1, 1, float(100 * round + 50));
  }
  for (const OperationPtr& operation : posted) me.finish(operation);
  for (const auto& [tensor, first] : expected) CHECK(tensor.counts_from(first));
}

// Also with the single queue that Megatron-core requires.
TEST(pipelines_hold_with_any_number_of_queues) {
  for (const size_t num_queues : {1, 2, 3, 8})
    for (const int size : {2, 4}) {
      check::context = std::to_string(num_queues) + " queues, " + std::to_string(size) + " ranks";
      run(with_queues(size, num_queues), [](Rank& me) {
        connect_with_neighbours(me, {0, 1});
        run_1f1b(me, 6);
      });
    }
}

// Messages with both neighbours on a ring, received before they are sent: in one batch they need no queue of
// their own.
TEST(a_batch_holds_with_one_queue) {
  for (const bool is_async : {false, true})
    run(with_queues(4, 1), [&](Rank& me) {
      const int next = (me.rank + 1) % 4, before = (me.rank + 3) % 4;
      const Tensor mine({4}, float(me.rank)), from_next({4}), from_before({4});
      for (int round = 0; round < 3; ++round)
        me.finish(
            me.p2p({from_next.from(next), from_before.from(before), mine.to(next), mine.to(before)},
                   is_async));
      CHECK(from_next.counts_from(float(next)) && from_before.counts_from(float(before)));
    });
}

// Two receives on one lane, and then the send that the peer waits for: the second receive cannot
// start before the first one ends, and in the queue that all streams share it blocks the send. With
// as many queues as a device has by default nothing blocks it.
TEST(separate_calls_wait_for_each_other_in_one_queue) {
  for (const bool is_alone : {true, false})
    run(with_queues(2, is_alone ? 1 : 8, is_alone), [&](Rank& me) {
      const int peer = 1 - me.rank;
      connect_with_neighbours(me, {0, 1});
      const Tensor first({4}), second({4}), mine({4}, 7);
      std::vector<OperationPtr> posted{
          me.p2p({first.from(peer)}, true), me.p2p({second.from(peer)}, true),
          me.p2p({mine.to(peer)}, true), me.p2p({mine.to(peer)}, true)};
      if (is_alone) {
        finish_stuck(me, [&] { me.finish(posted.front()); });
        return;
      }
      for (const OperationPtr& operation : posted) me.finish(operation);
      CHECK(first.counts_from(7) && second.counts_from(7));
    });
}

// Rank 0 receives on two channels, rank 1 sends on them in the other order. If rank 0's first receive runs by
// the time that NCCL connects the second channel, NCCL waits for it, and it for the message that comes after:
// both calls say so at their deadline. With the links made before there is nothing to wait for.
TEST(a_link_waits_for_kernels_of_its_device) {
  for (const bool connects : {false, true}) {
    Options options = options_of(2);
    options.num_channels = 2;
    options.timeout = connects ? 600s : 1s;
    options.prepare = [](fake::World& world) { world.init_waits = true; };
    std::atomic<bool> is_posted = false;
    run(options, [&](Rank& me) {
      const Tensor tensors[] = {Tensor({4}, float(10 * me.rank)),
                                Tensor({4}, float(10 * me.rank + 1))};
      if (connects) connect_with_neighbours(me, {0, 1});
      const auto exchange = [&] {
        std::vector<OperationPtr> posted;
        if (me.rank == 0) {
          posted.push_back(me.p2p({tensors[0].from(1, 0)}, true));
          is_posted = true;
        } else {
          CHECK(comes_true([&] { return is_posted.load(); }));
        }
        for (const int channel : me.rank == 0 ? std::vector{1} : std::vector{1, 0})
          posted.push_back(me.p2p(
              {me.rank == 0 ? tensors[channel].from(1, channel) : tensors[channel].to(0, channel)},
              true));
        for (const OperationPtr& operation : posted) me.finish(operation);
      };
      if (connects) {
        exchange();
        CHECK(tensors[0].counts_from(10) && tensors[1].counts_from(11));
      } else {
        failure_text(FailureKind::timeout, exchange);  // of the link, or of the receive
      }
    });
  }
}

// The usage reported to a user is the device memory that NCCL takes while links are made.
TEST(memory_of_communicators_is_counted) {
  run(options_of(4), [](Rank& me) {
    CHECK_EQ(me.comm->execution().device_usage().num_bytes, 0);
    meet(me);
    const Tensor mine({4}, float(me.rank)), theirs({4});
    if (me.rank < 2) me.finish(me.p2p({mine.to(1 - me.rank), theirs.from(1 - me.rank)}));
    CHECK_EQ(me.comm->execution().device_usage().num_bytes,
             me.rank < 2 ? 2 * fake::kBytesPerPeer : 0);
    meet(me);
    me.finish(me.comm->broadcast(theirs.ref(), 0));
    CHECK_EQ(me.comm->execution().device_usage().num_bytes,
             (me.rank < 2 ? 5 : 3) * fake::kBytesPerPeer);
    meet(me);
  });
}
