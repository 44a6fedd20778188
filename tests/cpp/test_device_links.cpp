// Links: made only between ranks that need each other, on first use, independent of the
// applications of the other ranks.

#include "device_exchanges.h"
#include "plan/signature.h"

int num_comms() {
  std::lock_guard lock(fake::world->mutex);
  return int(fake::world->comms.size());
}

// Two ranks of four exchange messages while the others call nothing. A constructor makes no
// communicator, a pair makes one for each direction of a channel that it uses, on either end, and
// the collectives make one.
TEST(only_ranks_that_need_each_other) {
  run(options_of(4), [](Rank& me) {
    const Tensor mine({4}, float(me.rank)), theirs({4});
    meet(me);
    CHECK(num_comms() == 0);
    meet(me);
    if (me.rank < 2)
      for (int round = 0; round < 3; ++round) {
        me.finish(me.p2p({mine.to(1 - me.rank), theirs.from(1 - me.rank)}));
        CHECK(theirs.counts_from(float(1 - me.rank)));
      }
    meet(me);
    CHECK(num_comms() == 4);
    CHECK(me.comm->execution().device_usage().num_nccl_comms == (me.rank < 2 ? 2 : 0));
    meet(me);
    me.finish(me.comm->broadcast(theirs.ref(), 0));
    me.finish(me.comm->broadcast(theirs.ref(), 1));
    meet(me);
    CHECK(num_comms() == 8);
    CHECK(me.comm->execution().device_usage().num_nccl_comms == (me.rank < 2 ? 3 : 1));
    meet(me);
  });
}

// Both ends record how far each link has come.
TEST(the_states_of_links) {
  run(options_of(2), [](Rank& me) {
    const Tensor tensor({4});
    me.finish(me.p2p({me.rank == 0 ? tensor.to(1) : tensor.from(0)}));
    me.finish(me.comm->broadcast(tensor.ref(), 0));
    std::map<std::pair<std::string, int>, std::string> states;
    for (const ConnectionEvent& event : me.comm->connections())
      states[{event.connection, event.peer}] += " " + event.state;
    const std::string made = " waiting offered connecting ready";
    CHECK_EQ((states[{"nccl of ranks 0 > 1 on channel 0", 1 - me.rank}]), made);
    CHECK_EQ((states[{"nccl of all ranks on channel 15", -1}]), made);
    CHECK_EQ(states.size(), 2u);
    meet(me);
  });
}

// The first message to a rank whose user is busy with something else: it is connected all the same.
TEST(the_other_user_sleeps) {
  std::atomic<bool> is_posted = false;
  Options options = options_of(2);
  options.prepare = [](fake::World& world) { world.fifo_bytes = 1024; };
  run(options, [&](Rank& me) {
    const Swap swap(me);
    if (me.rank == 0) {
      me.finish(me.p2p({swap.mine.to(1)}, true));  // into the FIFO
      is_posted = true;
    } else {
      CHECK(comes_true([&] { return is_posted.load(); }));
      me.finish(me.p2p({swap.theirs.from(0)}, true));
      CHECK(swap.has_come());
    }
  });
}

// connect() of one end is enough for a pair; that of the collectives waits for all ranks.
TEST(connecting_early) {
  run(options_of(3), [](Rank& me) {
    const auto comes_to = [&](int number) {
      return comes_true(
          [&] { return me.comm->execution().device_usage().num_nccl_comms == number; });
    };
    if (me.rank == 2) me.comm->connect(std::vector{1, 2}, std::vector{1});
    CHECK(comes_to(me.rank == 0 ? 0 : 2));
    meet(me);
    CHECK(num_comms() == 4);
    meet(me);
    if (me.rank == 1) me.comm->connect(std::vector{2}, std::nullopt);
    CHECK(comes_to(me.rank == 0 ? 0 : 4));
    meet(me);
    CHECK(num_comms() == 8);
    meet(me);
    me.comm->connect(std::vector{0, 1, 2});
    CHECK(comes_to(9));
    meet(me);
    CHECK(num_comms() == 27);
    meet(me);
    const Tensor tensor({4}, 1), theirs({4});
    me.finish(me.comm->broadcast(tensor.ref(), 0));
    me.finish(me.p2p({tensor.to((me.rank + 1) % 3, 1), theirs.from((me.rank + 2) % 3, 1)}));
    CHECK(num_comms() == 27);
    meet(me);
  });
}

// Both ends, all pairs, all channels and the collectives at once, repeatedly. Each rank makes links
// in another order, and ends them in the same one.
TEST(everybody_at_once) {
  for (int attempt = 0; attempt < 10; ++attempt) {
    Options options = options_of(5);
    options.num_channels = 3;
    options.end_limit = 60s;
    run(options, [&](Rank& me) {
      if ((attempt + me.rank) % 3 == 0) me.comm->connect(std::vector{0, 1, 2, 3, 4});
      std::vector<Tensor> tensors;
      std::vector<PointToPoint> batch;
      for (int peer = 0; peer < 5; ++peer)
        for (int channel = 0; channel < 3 && peer != me.rank; ++channel) {
          batch.push_back(
              tensors.emplace_back(Dims{4}, float(10 * me.rank + channel)).to(peer, channel));
          batch.push_back(tensors.emplace_back(Dims{4}).from(peer, channel));
        }
      me.finish(me.p2p(batch, attempt % 2));
      for (size_t idx = 1; idx < batch.size(); idx += 2)
        CHECK(tensors[idx].counts_from(float(10 * batch[idx].peer + batch[idx].channel)));
      const Tensor shared({4}, me.rank == 3 ? 7 : -1);
      me.finish(me.comm->broadcast(shared.ref(), 3, {.is_async = false}));
      CHECK(shared.counts_from(7));
      const auto begin = Clock::now();
      me.comm->close(kNothing);
      CHECK(Clock::now() - begin < 30s && me.comm->execution().end_warning().empty());
    });
  }
}

// Messages of a rank on more lanes than kernels fit the device: each has 14 of each channel. NCCL
// launches them in an order of its own.
TEST(more_lanes_than_run_at_once) {
  constexpr int kSize = check::kSanitized ? 6 : 8;
  constexpr int kChannels = 5;
  Options options = options_of(kSize, Check::off);
  options.num_channels = kChannels;
  options.timeout = 180s;  // so many threads take seconds, and more on busy cores
  options.prepare = [](fake::World& world) {
    world.num_multiprocessors = 32;
    world.max_resident = 16;
  };
  run(options, [&](Rank& me) {
    std::vector<Tensor> tensors;
    std::vector<PointToPoint> batch;
    for (int peer = 0; peer < kSize; ++peer) {
      for (int channel = 0; channel < kChannels && peer != me.rank; ++channel) {
        const float first = float(1000 * me.rank + 10 * peer + channel);
        batch.push_back(tensors.emplace_back(Dims{9}, first).to(peer, channel));
        batch.push_back(tensors.emplace_back(Dims{9}).from(peer, channel));
      }
    }
    me.finish(me.p2p(batch, true));
    for (size_t idx = 1; idx < batch.size(); idx += 2)
      CHECK(tensors[idx].counts_from(
          float(1000 * batch[idx].peer + 10 * me.rank + batch[idx].channel)));
  });
}

// Each rank connects to all others on all channels at once: NCCL makes few communicators at a time,
// and all of them in the end. The user is warned once if the host may run out of multicast groups.
TEST(few_in_the_making_and_a_warning_of_many) {
  for (const uint64_t host : {0, 1}) {
    Options options = options_of(7);
    options.num_channels = 4;
    options.host = host;
    // The highest rank has a place for each of the first four that are offered to it.
    options.prepare = [](fake::World& world) { world.inits_wait_for = kMaxInTheMaking; };
    run(options, [&](Rank& me) {
      CHECK(me.comm->execution().take_warning().empty());
      me.comm->connect(std::vector{0, 1, 2, 3, 4, 5, 6}, std::vector{0, 1, 2, 3});
      CHECK(comes_true([&] { return me.comm->execution().device_usage().num_nccl_comms == 48; }));
      const std::string text = me.comm->execution().take_warning();
      if (host) CHECK_CONTAINS(text, "has made 48 NCCL communicators with ranks of its host");
      if (host) CHECK_CONTAINS(text, "NCCL_NVLS_ENABLE=0");
      CHECK(text.empty() == !host && me.comm->execution().take_warning().empty());
      meet(me);
      std::lock_guard lock(fake::world->mutex);
      CHECK_EQ(fake::world->max_in_the_making, kMaxInTheMaking);
    });
  }
}

// A capture cannot connect anything.
TEST(a_first_use_in_a_capture) {
  run(options_of(2, Check::off), [](Rank& me) {
    const Swap swap(me);
    capture(me, [&] {
      const std::string text = "inside a CUDA graph capture, where NCCL cannot connect them";
      CHECK_INVALID(text, me.p2p(swap.on()));
      CHECK_INVALID(text, me.comm->broadcast(swap.mine.ref(), 0, {.is_async = false}));
    });
    meet(me);  // connecting reaches the peer, whatever its thread does
    me.comm->connect(std::vector{0, 1});
    CHECK(comes_true([&] { return me.comm->execution().device_usage().num_nccl_comms == 5; }));
    meet(me);
    play(me, capture(me, [&] { me.p2p(swap.on()); }));
    CHECK(swap.has_come());
    meet(me);
  });
}

// A link is made while another thread captures: nothing of it is for the capture.
TEST(connecting_beside_a_capture) {
  run(options_of(3), [](Rank& me) {
    const Tensor mine({4}, float(me.rank)), theirs({4}), third({4});
    const std::vector<PointToPoint> batch{mine.to(1 - me.rank), theirs.from(1 - me.rank)};
    if (me.rank < 2) me.finish(me.p2p(batch));
    meet(me);
    fake::GraphPtr graph;
    if (me.rank == 0) {
      graph = capture(me, [&] {
        me.p2p(batch);
        CHECK(comes_true([&] { return me.comm->execution().device_usage().num_nccl_comms == 4; }));
      });
    } else if (me.rank == 1) {
      me.p2p(batch, true);
    } else {
      me.comm->connect(std::vector{0}, std::vector{0});
    }
    meet(me);
    if (me.rank == 0) me.runtime->replay(graph);
    meet(me);
    CHECK(!me.comm->failure());
  });
}

// The peer has closed the communicator long ago, and the two have never exchanged a message.
TEST(a_peer_that_has_closed) {
  for (const int size : {3, 10}) {
    std::atomic<int> num_closed = 0;
    Options options = options_of(size);
    options.end_limit = 300ms;
    run(options, [&](Rank& me) {
      if (me.rank != 0) {
        me.comm->close(kNothing);
        ++num_closed;
        return;
      }
      CHECK(comes_true([&] { return num_closed == size - 1; }));
      const Tensor mine({4}, 1);
      const auto begin = Clock::now();
      CHECK(contains(failure_text(FailureKind::peer_lost, [&] { me.p2p({mine.to(size - 1)}); }),
                     "has closed its communicator"));
      CHECK(Clock::now() - begin < 10s && !me.comm->failure());
    });
  }
}

// The other rank closes while the first message to it is in flight, sooner or later: the sender
// learns of that, and nothing waits for the deadline.
TEST(a_peer_that_closes_meanwhile) {
  for (int attempt = 0; attempt < 60; ++attempt) {
    Options options = options_of(2 + attempt % 2);
    options.timeout = 600s;
    options.end_limit = 300ms;
    run(options, [&](Rank& me) {
      meet(me);
      if (me.rank == attempt / 2 % 2) {
        std::this_thread::sleep_for(std::chrono::microseconds(attempt * 37 % 1500));
        return;
      }
      if (me.rank == 2) return;
      const Tensor mine({4}, 1);
      const auto begin = Clock::now();
      try {
        me.p2p({mine.to(1 - me.rank)}, true);
        failure_of(me);  // it was taken, and has no other end
      } catch (const PipeCommException& error) {
        CHECK(error.failure()->kind == FailureKind::peer_lost);
        CHECK(contains(error.what(), "has closed its communicator"));
      }
      CHECK(Clock::now() - begin < 30s);
    });
  }
}

// Ranks connect to all and close immediately, each at another time: refused links block no rank,
// and no thread is left in NCCL.
TEST(connecting_and_closing) {
  for (int attempt = 0; attempt < 40; ++attempt) {
    Options options = options_of(2 + attempt % 4);
    options.timeout = 600s;
    options.end_limit = 60s;
    options.prepare = [](fake::World& world) { world.expects_all_to_connect = true; };
    run(options, [&](Rank& me) {
      std::vector<int> all;
      for (int rank = 0; rank < me.size; ++rank) all.push_back(rank);
      if ((me.rank + attempt) % 3 != 0) me.comm->connect(all);
      std::this_thread::sleep_for(std::chrono::microseconds((attempt * me.rank * 131) % 2000));
      const auto begin = Clock::now();
      me.comm->close(kNothing);
      CHECK(Clock::now() - begin < 30s && me.comm->execution().end_warning().empty());
    });
  }
}

// NCCL cannot make a communicator on the higher rank of a pair: all ranks get the reason.
TEST(nccl_cannot_connect) {
  for (const int needing : {0, 1, 2}) {
    const std::string first_use = needing == 0 ? "ncclRecv" : "ncclSend";
    for (const std::string& failing : {std::string("ncclCommInitRankConfig"), first_use}) {
      const auto result = failing == first_use && needing < 2 ? NcclResult::internal_error
                                                              : NcclResult::system_error;
      const auto kind =
          result == NcclResult::system_error ? FailureKind::peer_lost : FailureKind::error;
      Options options = options_of(3);
      options.inject = [&](const std::string& call, int rank) {
        return call == failing && rank == 1 ? result : NcclResult::success;
      };
      run(options, [&](Rank& me) {
        if (me.rank == needing) {
          const Tensor mine({4}, 1);
          failure_text(kind, [&] { me.p2p({mine.to(needing == 1 ? 0 : 1)}); });
        }
        const FailurePtr failure = failure_of(me);
        CHECK(failure->kind == kind && failure->origin_rank == std::max(1, needing));
        CHECK_CONTAINS(failure->message, "connecting NCCL failed: " + failing);
        CHECK_CONTAINS(failure->message, "NCCL_DEBUG=INFO");
      });
    }
  }
}

// Messages of another version or group: about links that no rank can know, and one that all know.
TEST(control_messages_without_sense) {
  using Kind = ControlMessage::Kind;
  struct Case {
    Kind kind;
    uint64_t number = 0;
    size_t num_bytes = 0;
    int channel = kCollectiveChannel;
    bool is_known = true, is_one_way = false;
  };
  for (const Case& each :
       {Case{Kind::invite, 0, 1}, Case{Kind::invite, 0, 8}, Case{Kind::invite, 0, 8, 0, true, true},
        Case{Kind::invite, 0, 0, kControlChannel}, Case{Kind::ask, 0, 4},
        Case{Kind::offer, 0, 0, 0, false}, Case{Kind::offer}, Case{Kind::go, 0, 128},
        Case{Kind::go, 0, 127}, Case{Kind::refuse, 2}, Case{Kind(99)}, Case{Kind::meet, 77},
        Case{Kind::meet, 0, 0, 0, false}, Case{Kind::closing, 0, 1}}) {
    std::barrier meeting(2);
    run(options_of(2), [&](Rank& me) {
      const Tensor shared({4}, 1);
      me.finish(me.comm->broadcast(shared.ref(), 0));
      meeting.arrive_and_wait();
      Signature name("link");
      name.add(int64_t{each.channel}).add(int64_t{each.is_one_way});
      const ControlMessage message{.kind = each.kind,
                                   .channel = each.channel,
                                   .is_one_way = each.is_one_way,
                                   .link = name.value() + !each.is_known,
                                   .number = each.number,
                                   .payload = std::vector<std::byte>(each.num_bytes)};
      if (me.rank == 1) me.comm->transport().send_control(0, message.encoded());
      CHECK_CONTAINS(failure_of(me)->message,
                     "sent an NCCL control message that this rank does not know");
    });
  }
}

ControlMessage some_message(std::mt19937& random) {
  using Kind = ControlMessage::Kind;
  ControlMessage message{.kind = Kind(random() % 9),
                         .channel = int(random() % (kCollectiveChannel + 1)),
                         .is_one_way = random() % 2 == 1,
                         .direction = Direction(random() % 2),
                         .link = random(),
                         .number = random()};
  if (message.has_ranks()) message.payload.resize(4 * (random() % 5));
  if (message.kind == Kind::go) message.payload.resize(sizeof(NcclUniqueId));
  if (message.kind == Kind::claim) message.payload.resize(random() % 9);
  if (message.kind == Kind::claim) message.descriptor.num_bytes = int64_t(random());
  for (std::byte& byte : message.payload) byte = std::byte(random());
  return message;
}

// Decoding returns the encoded message; other bytes are refused or give fields of a valid form.
TEST(control_messages) {
  std::mt19937 random(7);
  int num_refused = 0;
  for (int attempt = 0; attempt < 20000; ++attempt) {
    std::vector<std::byte> bytes = some_message(random).encoded();
    CHECK(ControlMessage::decoded(bytes).encoded() == bytes);
    if (attempt % 2 == 0) bytes.resize(random() % (bytes.size() + 9));
    for (int changed = 0; changed < 3 && !bytes.empty(); ++changed)
      bytes[random() % std::min<size_t>(bytes.size(), 8 + random() % 100)] ^= std::byte(random());
    try {
      const auto message = ControlMessage::decoded(bytes);
      CHECK(message.channel <= kCollectiveChannel && message.descriptor.num_bytes >= 0);
      CHECK_EQ(message.encoded().size(), bytes.size());
    } catch (const std::runtime_error& error) {
      CHECK_CONTAINS(error.what(), "malformed control message");
      ++num_refused;
    }
  }
  CHECK(num_refused > 5000 && num_refused < 19999);
}
