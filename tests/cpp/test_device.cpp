// The device communicator's host logic, with several ranks as threads over a simulated device.

#include "device_exchanges.h"
#include "plan/reshard.h"

TEST(neighbours_exchange) {
  run(options_of(3), [](Rank& me) {
    const int next = (me.rank + 1) % 3, prev = (me.rank + 2) % 3;
    for (bool is_async : {false, true}) {
      const Tensor forward({5}, float(10 * me.rank)), backward({2, 3}, float(100 * me.rank));
      Tensor from_prev({5}), from_next({2, 3});
      const auto operation = me.p2p(
          {forward.to(next), from_prev.from(prev), backward.to(prev, 1), from_next.from(next, 1)},
          is_async);
      me.follow(operation);
      me.finish(operation);
      CHECK(from_prev.counts_from(float(10 * prev)));
      CHECK(from_next.counts_from(float(100 * next)));
      CHECK(me.comm->is_completed(*operation));
    }
  });
}

// Each rank is the other's next and previous one, both send first, then both receive: a send of one
// channel must not wait for a receive of the other.
TEST(channels_are_independent) {
  run(options_of(2), [](Rank& me) {
    const int peer = 1 - me.rank;
    const Tensor mine({1000}, float(me.rank));
    Tensor theirs({1000});
    const auto sent = me.p2p({mine.to(peer, me.rank)}, true);
    const auto received = me.p2p({theirs.from(peer, peer)}, true);
    me.finish(received);
    me.finish(sent);
    CHECK(theirs.counts_from(float(peer)));
  });
}

TEST(unusual_messages) {
  run(options_of(2), [](Rank& me) {
    const int peer = 1 - me.rank;
    me.finish(me.p2p({}, true));
    const Tensor nothing({0, 4});
    me.finish(me.p2p({nothing.to(peer), nothing.from(peer)}, true));

    const Tensor mine({6}, 3);
    Tensor copy({6});
    me.finish(me.p2p({mine.to(me.rank), copy.from(me.rank)}));
    CHECK(copy.counts_from(3));

    // Into every second column, from the peer and from myself.
    const Tensor column({3, 2}, float(7 * me.rank));
    Tensor table({3, 8}, 0);
    TensorRef odd = table.ref(), even = table.ref();
    odd.shape = even.shape = {3, 2};
    odd.strides = even.strides = {8, 2};
    odd.data += sizeof(float);
    const auto operation = me.p2p({column.to(peer),
                                   {Direction::recv, peer, 0, odd},
                                   column.to(me.rank),
                                   {Direction::recv, me.rank, 0, even}},
                                  true);
    me.finish(operation);
    CHECK(me.runtime->num_launches <= 2);  // one for each lane
    for (int row = 0; row < 3; ++row) {
      for (int idx = 0; idx < 2; ++idx) {
        CHECK((*table.data)[row * 8 + 2 * idx + 1] == float(7 * peer + row * 2 + idx));
        CHECK((*table.data)[row * 8 + 2 * idx] == float(7 * me.rank + row * 2 + idx));
      }
      CHECK((*table.data)[row * 8 + 5] == float(row * 8 + 5));
    }
  });
}

TEST(large_batches_are_cut) {
  Options options = options_of(3);
  options.max_ops_per_group = 16;
  run(options, [](Rank& me) {
    std::vector<Tensor> mine, theirs;
    std::vector<PointToPoint> batch;
    for (int idx = 0; idx < 200; ++idx) {
      for (int peer = 0; peer < 3; ++peer) {
        if (peer == me.rank) continue;
        mine.emplace_back(Dims{idx % 5}, float(1000 * me.rank + idx));
        batch.push_back(mine.back().to(peer));
        theirs.emplace_back(Dims{idx % 5});
        batch.push_back(theirs.back().from(peer));
      }
    }
    me.finish(me.p2p(batch));
    size_t at = 0;
    for (int idx = 0; idx < 200; ++idx)
      for (int peer = 0; peer < 3; ++peer)
        if (peer != me.rank) CHECK(theirs[at++].counts_from(float(1000 * peer + idx)));
    CHECK(fake::world->max_group_ops <= 16 && fake::world->num_kernels > 3 * 40);
  });
}

PreparedExchangePtr transpose_plan(const Rank& me, int64_t rows, Sizes columns) {
  const TensorSpec input{{rows, std::accumulate(columns.begin(), columns.end(), int64_t{0})},
                         dtypes::kFloat32};
  return std::make_shared<PreparedExchange>(all_to_all_plan(
      {me.rank, me.size}, {{input, columns, Sizes(me.size, rows)}}, 1, 0, Scale::multiply(2)));
}

TEST(collectives) {
  for (Check check : {Check::first_use, Check::full, Check::off}) {
    run(options_of(3, check), [](Rank& me) {
      const Sizes columns{1, 0, 4};
      const auto plan = transpose_plan(me, 2, columns);
      for (bool is_async : {false, true, true}) {
        const Tensor input({2, 5}, float(100 * me.rank));
        Tensor output({6, columns[me.rank]});
        const auto operation = me.comm->exchange(OpCode::all_to_all, plan, std::vector{input.ref()},
                                                 std::vector{output.ref()}, {.is_async = is_async});
        me.follow(operation);
        me.finish(operation);
        const int64_t first = me.rank == 0 ? 0 : 1;
        for (int64_t row = 0; row < 6; ++row)
          for (int64_t column = 0; column < columns[me.rank]; ++column)
            CHECK((*output.data)[row * columns[me.rank] + column] ==
                  2 * float(100 * (row / 2) + (row % 2) * 5 + first + column));
      }
      for (int source = 0; source < 3; ++source) {
        Tensor tensor({4}, me.rank == source ? 50.0f : -1.0f);
        me.finish(me.comm->broadcast(tensor.ref(), source, {.is_async = source == 1}));
        CHECK(tensor.counts_from(50));
      }
      CHECK(me.comm->execution().copy_counters().num_exchanges == 3);
      meet(me);
    });
  }
}

TEST(wrong_arguments) {
  run(options_of(2), [](Rank& me) {
    const Tensor tensor({4}, 1);
    Tensor other({4});
    for (const auto& [batch, text] : std::vector<std::pair<std::vector<PointToPoint>, std::string>>{
             {{tensor.to(2)}, "peer 2 is not in 0..1"},
             {{tensor.to(1, 5)}, "channel 5 is not in 0..1"},
             {{tensor.to(me.rank)}, "needs its receive"},
             {{tensor.to(1 - me.rank), tensor.from(1 - me.rank)}, "share memory"}})
      CHECK_INVALID(text, me.p2p(batch));
    me.finish(me.p2p({tensor.to(1 - me.rank), other.from(1 - me.rank)}));
    CHECK(other.counts_from(1));
  });
}

TEST(mismatched_messages) {
  for (Check check : {Check::first_use, Check::full}) {
    run(options_of(2, check), [](Rank& me) {
      const Tensor mine({4}, 1);
      Tensor theirs({me.rank == 0 ? 4 : 6});
      // The rank that posts last may fail immediately, and its device may be done before that.
      try {
        me.finish(me.p2p({me.rank == 0 ? mine.to(1) : theirs.from(0)}, true));
      } catch (const PipeCommException& error) {
        CHECK(error.failure()->kind == FailureKind::mismatch);
      }
      const std::string text = failure_of(me)->message;
      CHECK(contains(text, "float32[4] (16 B)") && contains(text, "float32[6] (24 B)"));
      failure_text(FailureKind::mismatch, [&] { me.p2p({mine.to(1 - me.rank)}); });
      CHECK(failure_of(me)->peer >= 0);
    });
  }
}

// A relay moves a flat form of the tensor that the user knows.
TEST(errors_show_the_tensor_of_the_plan) {
  run(options_of(2), [](Rank& me) {
    const TensorSpec whole{{12}, dtypes::kFloat32};
    ReshardOptions plan_options;
    plan_options.tag = me.rank == 0 ? "direct" : "sharded";
    plan_options.shown = TensorSpec{{3, 4}, dtypes::kFloat32};
    const auto plan = std::make_shared<PreparedExchange>(
        reshard_plan({me.rank, 2}, whole, {{0}, {}, false, 0}, {{1}, {}, false, 0}, plan_options));
    const Tensor tensor({12}, 1);
    const std::vector<TensorRef> mine{tensor.ref()}, none;
    try {
      me.comm->exchange(OpCode::relay, plan, me.rank == 0 ? mine : none, me.rank == 0 ? none : mine,
                        {.is_async = false});
    } catch (const PipeCommException& error) {
      CHECK(error.failure()->kind == FailureKind::mismatch);
    }
    CHECK(contains(failure_of(me)->message, "relay of float32[3, 4] with a message of "));
  });
}

// Only ranks that change their exchange send each other claims, and only the first time.
TEST(changing_exchanges) {
  std::barrier meeting(3);
  run(options_of(3), [&](Rank& me) {
    const Uneven first{{{1, 2, 3}, {4, 5, 6}, {7, 8, 9}}};
    const Uneven second = with_size(first, 0, 1, 7);
    auto traffic_so_far = [&] {
      meeting.arrive_and_wait();
      const int number = me.hub.num_messages() + me.hub.num_control();
      meeting.arrive_and_wait();
      return number;
    };
    auto traffic = [&](const Uneven& uneven) {
      const int before = traffic_so_far();
      CHECK(run_uneven(me, uneven));
      return traffic_so_far() - before;
    };
    // Claims of both directions, and the messages that make the link of all ranks: at most five on
    // each of two edges.
    const int first_traffic = traffic(first);
    CHECK(first_traffic >= 12 + 8 && first_traffic <= 12 + 10);
    CHECK(traffic(first) == 0);
    CHECK(traffic(second) == 2);
    CHECK(traffic(second) == 0 && traffic(first) == 0);

    me.runtime->begin_capture();
    for (const Uneven& uneven : {first, with_size(first, 0, 1, 9)}) {
      try {
        const Member member{me.rank, me.size};
        const Sizes& sends = uneven.sizes[me.rank];
        Sizes recvs;
        for (const Sizes& row : uneven.sizes) recvs.push_back(row[me.rank]);
        const Tensor input({std::accumulate(sends.begin(), sends.end(), int64_t{0})});
        const Tensor output({std::accumulate(recvs.begin(), recvs.end(), int64_t{0})});
        me.comm->exchange(OpCode::all_to_all,
                          std::make_shared<PreparedExchange>(all_to_all_single_plan(
                              member, {input.shape, dtypes::kFloat32},
                              {output.shape, dtypes::kFloat32}, sends, recvs)),
                          std::vector{input.ref()}, std::vector{output.ref()}, {.is_async = false});
        CHECK(uneven.sizes[0][1] == 2 || me.rank == 2);
      } catch (const std::invalid_argument& error) {
        CHECK(uneven.sizes[0][1] == 9 && contains(error.what(), "inside a CUDA graph capture"));
      }
    }
    me.runtime->end_capture();
    meeting.arrive_and_wait();
    CHECK(!me.comm->failure());
  });
}

TEST(steady_state_has_no_host_traffic) {
  run(options_of(2), [](Rank& me) {
    const int peer = 1 - me.rank;
    const Tensor mine({4}, 1);
    Tensor theirs({4}), shared({4});
    auto step = [&] {
      me.finish(me.p2p({mine.to(peer), theirs.from(peer)}, true));
      me.finish(me.comm->broadcast(shared.ref(), 0, {.is_async = false}));
    };
    step();
    meet(me);
    const int num_claims = me.hub.num_control();
    CHECK(num_claims <= 12 + 5 + 5 + 5);  // of messages, two links of the pair, and one of all
    const int num_messages = me.hub.num_messages();
    meet(me);
    for (int idx = 0; idx < 5; ++idx) step();
    CHECK(me.hub.num_control() == num_claims);
    meet(me);
    CHECK(me.hub.num_messages() <= num_messages + 4);  // the two meetings
  });
}

TEST(flight_records) {
  run(options_of(2), [](Rank& me) {
    const int peer = 1 - me.rank;
    const Tensor mine({4}, 1);
    Tensor theirs({4}), shared({2, 3});
    me.finish(me.p2p({mine.to(peer, 1), theirs.from(peer, 1)}, true));
    me.finish(me.comm->broadcast(shared.ref(), 0, {.is_async = false}));
    me.finish(me.p2p({mine.to(peer, 1), theirs.from(peer, 1)}, true));
    std::vector<Flight> flights = me.comm->flights();
    CHECK(flights.size() == 3);
    for (size_t idx = 0; idx < flights.size(); ++idx) {
      const auto& [operation, messages] = flights[idx];
      CHECK(operation.number == idx);
      CHECK(operation.ended && !operation.failure);
      CHECK(operation.posted_at <= operation.ended_at);
      CHECK(operation.op == (idx == 1 ? OpCode::broadcast : OpCode::p2p));
      CHECK(messages.size() == (idx == 1 ? 1 : 2));
      for (const FlightMessage& message : messages) {
        CHECK(message.peer == peer && message.state == MessageState::done);
        CHECK(message.descriptor.seq == (idx == 2 ? 1 : 0));
        CHECK(message.descriptor.num_bytes == (idx == 1 ? 24 : 16));
        CHECK(message.descriptor.channel == (idx == 1 ? kCollectiveChannel : 1));
      }
    }
  });
}

// One rank runs out of memory before it enqueues anything: it refuses the collective, as Python
// does after an exception.
TEST(memory_that_one_rank_lacks) {
  run(options_of(3), [](Rank& me) {
    const Tensor whole({4, 2}, 1);
    TensorRef column = whole.ref();
    column.shape = {4};
    column.strides = {2};
    const auto call = [&] { me.finish(me.comm->broadcast(column, 0)); };
    call();
    meet(me);
    me.runtime->is_out_of_memory = me.rank == 1;
    if (me.rank == 1) {
      CHECK_THROWS(std::runtime_error, "CUDA out of memory", call());
      me.comm->refuse(OpCode::broadcast, "CUDA out of memory");
    } else {
      failure_text(FailureKind::mismatch, call);
    }
    CHECK_CONTAINS(failure_of(me)->message, "refused by rank 1: CUDA out of memory");
  });
}

TEST(a_failing_call_reaches_everybody) {
  Options options = options_of(3);
  options.inject = [num = std::make_shared<std::atomic<int>>(0)](const std::string& call,
                                                                 int rank) {
    // Rank 0 of the pair sends one message while connecting.
    return call == "ncclSend" && rank == 0 && ++*num > 1 ? NcclResult::internal_error
                                                         : NcclResult::success;
  };
  run(options, [](Rank& me) {
    const Tensor tensor({4}, 1);
    if (me.rank == 0) {
      CHECK_CONTAINS(failure_text(FailureKind::error, [&] { me.p2p({tensor.to(1, 1)}); }),
                     "ncclSend: some error (details of the fake)");
      CHECK(fake::group_depth() == 0);
    } else if (me.rank == 1) {
      CHECK_CONTAINS(
          failure_text(FailureKind::error, [&] { me.finish(me.p2p({tensor.from(0, 1)}, true)); }),
          "ncclSend: some error");
    }
    CHECK_CONTAINS(failure_of(me)->message, "ncclSend: some error");
    CHECK(failure_of(me)->origin_rank == 0);
  });
}

TEST(timeout) {
  Options options = options_of(2);
  options.timeout = 500ms;
  run(options, [](Rank& me) {
    const Tensor tensor({4}, 1);
    if (me.rank == 0) {
      const auto operation = me.p2p({tensor.from(1)}, true);
      CHECK(!me.comm->wait(*operation, Clock::now() + 20ms, kNothing));
      const std::string text = failure_text(FailureKind::timeout, [&] { me.finish(operation); });
      CHECK_CONTAINS(text, "timed out on the device");
      CHECK_CONTAINS(text, "recv #0 on channel 0 from rank 1 of float32[4]");
      CHECK(me.comm->is_completed(*operation));
    } else {
      CHECK(failure_of(me)->kind == FailureKind::timeout && failure_of(me)->origin_rank == 0);
    }
  });
}

TEST(dead_peer) {
  std::atomic<int> num_waiting = 0;
  run(options_of(3), [&](Rank& me) {
    const Tensor tensor({4}, 1);
    if (me.rank == 2) {
      CHECK(comes_true([&] { return num_waiting == 2; }));
      return me.hub.lose(2);
    }
    const auto operation = me.p2p({tensor.from(2)}, true);
    ++num_waiting;
    failure_text(FailureKind::peer_lost, [&] { me.finish(operation); });
    CHECK(failure_of(me)->origin_rank == 2);
    // The kernel returned when NCCL was aborted, which must not count as success.
    std::this_thread::sleep_for(100ms);
    failure_text(FailureKind::peer_lost, [&] { me.follow(operation); });
  });
}

TEST(abort) {
  run(options_of(2), [](Rank& me) {
    const Tensor tensor({4}, 1);
    if (me.rank == 0) {
      const auto operation = me.p2p({tensor.from(1)}, true);
      std::thread([&] { me.comm->abort("enough"); }).join();
      failure_text(FailureKind::aborted, [&] { me.finish(operation); });
    }
    CHECK_CONTAINS(failure_of(me)->message, "enough");
  });
}

TEST(asynchronous_error) {
  run(options_of(2), [](Rank& me) {
    me.finish(me.p2p(Swap(me).on()));
    meet(me);
    if (me.rank == 0) {
      std::lock_guard lock(fake::world->mutex);
      for (const auto& comm : fake::world->comms)
        if (comm->rank == 0) comm->async_error = NcclResult::remote_error;
    }
    CHECK(failure_of(me)->kind == FailureKind::peer_lost);
    CHECK_CONTAINS(failure_of(me)->message, "remote process exited");
  });
}

// Tensors stay alive until the device is done with them, and not longer.
TEST(lifetimes) {
  run(options_of(2), [](Rank& me) {
    if (me.rank == 1) {
      for (int channel : {0, 1}) {
        Tensor theirs({4});
        meet(me);
        me.finish(me.p2p({theirs.from(0, channel)}, true));
        CHECK(theirs.counts_from(1));
      }
      return;
    }
    std::weak_ptr<void> alive;
    {
      Tensor mine({4}, 1);
      alive = mine.data;
      me.p2p({mine.to(1)}, true);  // also drops the handle
    }
    CHECK(!alive.expired());
    meet(me);
    CHECK(comes_true([&] {
      me.p2p({});
      return alive.expired();
    }));

    // The stream that is made to wait is not the one on which the memory would be used again.
    const Tensor held({4}, 1);
    const auto num_owners = [&] { return held.data.use_count(); };
    const OperationPtr operation = me.p2p({held.to(1, 1)}, true);
    const StreamHandle caller = me.runtime->current_stream();
    me.runtime->set_current(me.runtime->new_stream());
    me.follow(operation);
    CHECK(num_owners() == 2);
    me.runtime->set_current(caller);
    me.follow(operation);
    CHECK(num_owners() == 1);
    meet(me);
    me.finish(operation);
  });
}

// NCCL runs the operations of one communicator one by one, whatever streams they are enqueued on.
TEST(one_lane_on_several_streams) {
  for (const bool is_async : {false, true}) {
    std::barrier both_are_enqueued(2);
    run(options_of(2), [&](Rank& me) {
      const float begin = me.rank == 0 ? 1 : -1;
      const Tensor first({4}, begin), second({4}, begin);
      if (me.rank == 0) {
        me.p2p({first.to(1)}, is_async);
        me.runtime->set_current(me.runtime->new_stream());
        const OperationPtr operation = me.p2p({second.to(1)});
        both_are_enqueued.arrive_and_wait();
        me.finish(operation);
      } else {
        both_are_enqueued.arrive_and_wait();
        me.finish(me.p2p({first.from(0)}));
        me.finish(me.p2p({second.from(0)}));
        CHECK(first.counts_from(1) && second.counts_from(1));
      }
    });
  }
}

TEST(one_rank) {
  run(options_of(1), [](Rank& me) {
    const Tensor mine({4}, 2);
    Tensor copy({4});
    me.finish(me.comm->batch_p2p(std::vector{mine.to(0), copy.from(0)}));
    CHECK(copy.counts_from(2));
    me.finish(me.comm->broadcast(copy.ref(), 0, {.is_async = false}));
    CHECK(fake::world->comms.empty());
  });
}
