// Links: made between ranks that need each other and no others, when they do, whatever the users of the
// other ranks are doing.
#include <atomic>
#include <cstring>
#include <set>

#include "device_exchanges.h"
#include "device_world.h"

namespace {

int num_comms() {
  std::lock_guard lock(fake::world->mutex);
  return int(fake::world->comms.size());
}

// Two ranks of four exchange messages while the others call nothing. A constructor makes nothing, a
// pair two communicators for each channel that it uses, on either end, and the collectives one.
void only_ranks_that_need_each_other() {
  run("links", options_of(4), [](Rank& me) {
    const Tensor mine({4}, float(me.rank)), theirs({4});
    meet(me);
    EXPECT(num_comms() == 0);
    meet(me);
    if (me.rank < 2)
      for (int round = 0; round < 3; ++round) {
        me.finish(me.p2p({mine.to(1 - me.rank), theirs.from(1 - me.rank)}));
        EXPECT(theirs.counts_from(float(1 - me.rank)));
      }
    meet(me);
    EXPECT(num_comms() == 4);
    EXPECT(me.comm->device_usage().num_nccl_comms == (me.rank < 2 ? 2 : 0));
    meet(me);
    me.finish(me.comm->broadcast(theirs.ref(), 0));
    me.finish(me.comm->broadcast(theirs.ref(), 1));
    meet(me);
    EXPECT(num_comms() == 8);
    EXPECT(me.comm->device_usage().num_nccl_comms == (me.rank < 2 ? 3 : 1));
    meet(me);
  });
}

// The first message to a rank whose user is busy with something else: it is connected all the same.
void the_other_user_sleeps() {
  std::atomic<bool> is_posted = false;
  run(
      "busy user", options_of(2),
      [&](Rank& me) {
        const Tensor mine({4}, float(me.rank)), theirs({4});
        if (me.rank == 0) {
          me.finish(me.p2p({mine.to(1)}, true));  // into the FIFO
          is_posted = true;
        } else {
          EXPECT(comes_true([&] { return is_posted.load(); }));
          me.finish(me.p2p({theirs.from(0)}, true));
          EXPECT(theirs.counts_from(0));
        }
      },
      nullptr, nullptr, [](fake::World& world) { world.fifo_bytes = 1024; });
}

// connect() of one end is enough for a pair; that of the collectives waits for all ranks.
void connecting_early() {
  run("connect", options_of(3), [](Rank& me) {
    const auto comes_to = [&](int number) {
      return comes_true([&] { return me.comm->device_usage().num_nccl_comms == number; });
    };
    if (me.rank == 2) me.comm->connect(std::vector{1, 2}, std::vector{1});
    EXPECT(comes_to(me.rank == 0 ? 0 : 2));
    meet(me);
    EXPECT(num_comms() == 4);
    meet(me);
    if (me.rank == 1) me.comm->connect(std::vector{2}, std::nullopt);
    EXPECT(comes_to(me.rank == 0 ? 0 : 4));
    meet(me);
    EXPECT(num_comms() == 8);
    meet(me);
    me.comm->connect(std::vector{0, 1, 2});
    EXPECT(comes_to(9));
    meet(me);
    EXPECT(num_comms() == 27);
    meet(me);
    const Tensor tensor({4}, 1), theirs({4});
    me.finish(me.comm->broadcast(tensor.ref(), 0));
    me.finish(me.p2p({tensor.to((me.rank + 1) % 3, 1), theirs.from((me.rank + 2) % 3, 1)}));
    EXPECT(num_comms() == 27);
    meet(me);
  });
}

// Both ends, all pairs, all channels and the collectives at once, again and again. Links come to be in
// another order on each rank, and end in one.
void everybody_at_once() {
  for (int attempt = 0; attempt < 10; ++attempt) {
    Options options = options_of(5);
    options.num_channels = 3;
    options.end_limit = 60s;
    run("all at once", options, [&](Rank& me) {
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
        EXPECT(tensors[idx].counts_from(float(10 * batch[idx].peer + batch[idx].channel)));
      const Tensor shared({4}, me.rank == 3 ? 7 : -1);
      me.finish(me.comm->broadcast(shared.ref(), 3, {.is_async = false}));
      EXPECT(shared.counts_from(7));
      const auto begin = Clock::now();
      me.comm->close(kNothing);
      EXPECT(Clock::now() - begin < 30s && me.comm->end_warning().empty());
    });
  }
}

// Messages of a rank on more lanes than kernels fit the device: of 14 ranks each has 26 of each channel,
// of 6 ranks 10. NCCL launches them in an order of its own.
void more_lanes_than_run_at_once() {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  constexpr int kSize = 6;  // whose kernels mostly get by without an order
#else
  constexpr int kSize = 14;
#endif
  constexpr int kChannels = 5;
  Options options = options_of(kSize, Check::off);
  options.num_channels = kChannels;
  const auto body = [&](Rank& me) {
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
      EXPECT(tensors[idx].counts_from(
          float(1000 * batch[idx].peer + 10 * me.rank + batch[idx].channel)));
  };
  run("many lanes", options, body, nullptr, nullptr,
      [](fake::World& world) { world.max_resident = 32; });
}

// An exchange of some ranks runs between pairs, on the channel of the collectives, too; one that names
// all ranks is one of all.
void exchanges_of_some_ranks() {
  run("some ranks", options_of(4), [](Rank& me) {
    const auto exchange = [&](std::vector<int> members) {
      const int num = int(members.size());
      const int own = int(std::ranges::find(members, me.rank) - members.begin());
      const TensorSpec spec{{num * 4}, dtypes::kFloat32};
      ExchangePlan plan = all_to_all_single_plan({own, num}, spec, spec, Sizes(size_t(num), 4),
                                                 Sizes(size_t(num), 4));
      for (auto* transfers : {&plan.sends, &plan.recvs})
        for (Transfer& transfer : *transfers) transfer.peer = members[size_t(transfer.peer)];
      plan.rank = me.rank;
      plan.size = me.size;
      const Tensor input(spec.shape, float(100 * me.rank)), output(spec.shape);
      const Scope scope{.members = members};
      me.finish(me.comm->exchange(
          OpCode::exchange, std::make_shared<PreparedExchange>(std::move(plan)),
          std::vector{input.ref()}, std::vector{output.ref()}, {.is_async = false}, scope));
      for (int idx = 0; idx < 4 * num; ++idx)
        EXPECT((*output.data)[size_t(idx)] ==
               float(100 * members[size_t(idx / 4)] + 4 * own + idx % 4));
    };
    if (me.rank != 1) exchange({0, 2, 3});
    meet(me);
    EXPECT(num_comms() == 12);
    meet(me);
    exchange({0, 1, 2, 3});
    meet(me);
    EXPECT(num_comms() == 16);
    meet(me);
  });
}

// A capture cannot connect anything.
void a_first_use_in_a_capture() {
  run("first in a capture", options_of(2, Check::off), [](Rank& me) {
    const int peer = 1 - me.rank;
    const Tensor mine({4}, float(me.rank)), theirs({4});
    const std::vector<PointToPoint> batch{mine.to(peer), theirs.from(peer)};
    const auto is_refused = [](const std::function<void()>& call) {
      try {
        call();
        return false;
      } catch (const std::invalid_argument& error) {
        return contains(error.what(),
                        "inside a CUDA graph capture, where NCCL cannot connect them");
      }
    };
    me.runtime->begin_capture();
    EXPECT(is_refused([&] { me.p2p(batch); }));
    EXPECT(is_refused([&] { me.comm->broadcast(mine.ref(), 0, {.is_async = false}); }));
    me.runtime->end_capture();
    me.comm->connect(std::vector{0, 1});
    EXPECT(comes_true([&] { return me.comm->device_usage().num_nccl_comms == 5; }));
    meet(me);
    me.runtime->begin_capture();
    me.p2p(batch);
    const fake::GraphPtr graph = me.runtime->end_capture();
    me.runtime->replay(graph);
    const EventPtr end = me.runtime->record(me.runtime->current_stream());
    EXPECT(comes_true([&] { return me.runtime->is_done(end); }));
    EXPECT(theirs.counts_from(float(peer)));
    meet(me);
  });
}

// A link is made while another thread captures: nothing of it is for the capture.
void connecting_beside_a_capture() {
  run("beside a capture", options_of(3), [](Rank& me) {
    const Tensor mine({4}, float(me.rank)), theirs({4}), third({4});
    const std::vector<PointToPoint> batch{mine.to(1 - me.rank), theirs.from(1 - me.rank)};
    if (me.rank < 2) me.finish(me.p2p(batch));
    meet(me);
    fake::GraphPtr graph;
    if (me.rank == 0) {
      me.runtime->begin_capture();
      me.p2p(batch);
      EXPECT(comes_true([&] { return me.comm->device_usage().num_nccl_comms == 4; }));
      graph = me.runtime->end_capture();
    } else if (me.rank == 1) {
      me.p2p(batch, true);
    } else {
      me.comm->connect(std::vector{0}, std::vector{0});
    }
    meet(me);
    if (me.rank == 0) me.runtime->replay(graph);
    meet(me);
    EXPECT(!me.comm->failure());
  });
}

// Its user has closed the communicator long ago, and the two have never had anything to say.
void a_peer_that_has_closed() {
  for (const int size : {3, 10}) {
    std::atomic<int> num_closed = 0;
    Options options = options_of(size);
    options.end_limit = 300ms;
    run("closed before", options, [&](Rank& me) {
      if (me.rank != 0) {
        me.comm->close(kNothing);
        ++num_closed;
        return;
      }
      EXPECT(comes_true([&] { return num_closed == size - 1; }));
      const Tensor mine({4}, 1);
      const auto begin = Clock::now();
      EXPECT(contains(failure_text(FailureKind::peer_lost, [&] { me.p2p({mine.to(size - 1)}); }),
                      "has closed its communicator"));
      EXPECT(Clock::now() - begin < 10s && !me.comm->failure());
    });
  }
}

// The other one closes while the first message to it is on its way, sooner or later: whoever asks hears
// of that, and nothing waits for the deadline.
void a_peer_that_closes_meanwhile() {
  for (int attempt = 0; attempt < 60; ++attempt) {
    Options options = options_of(2 + attempt % 2);
    options.timeout = 600s;
    options.end_limit = 300ms;
    run("closes meanwhile", options, [&](Rank& me) {
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
        EXPECT(error.failure()->kind == FailureKind::peer_lost);
        EXPECT(contains(error.what(), "has closed its communicator"));
      }
      EXPECT(Clock::now() - begin < 30s);
    });
  }
}

// Ranks connect to all and close at once, each at a time of its own: what is refused holds up nobody, and
// no thread is left in NCCL.
void connecting_and_closing() {
  for (int attempt = 0; attempt < 40; ++attempt) {
    Options options = options_of(2 + attempt % 4);
    options.timeout = 600s;
    options.end_limit = 60s;
    const auto body = [&](Rank& me) {
      std::vector<int> all;
      for (int rank = 0; rank < me.size; ++rank) all.push_back(rank);
      if ((me.rank + attempt) % 3 != 0) me.comm->connect(all);
      std::this_thread::sleep_for(std::chrono::microseconds((attempt * me.rank * 131) % 2000));
      const auto begin = Clock::now();
      me.comm->close(kNothing);
      EXPECT(Clock::now() - begin < 30s && me.comm->end_warning().empty());
    };
    run("connect and close", options, body, nullptr, nullptr,
        [](fake::World& world) { world.expects_all_to_connect = true; });
  }
}

// NCCL cannot make a communicator on the higher rank of a pair: all hear why, whoever needed it.
void nccl_cannot_connect() {
  for (const int needing : {0, 1, 2}) {
    for (const std::string failing : {"ncclCommInitRankConfig", "ncclSend"}) {
      const auto result = failing == "ncclSend" && needing < 2 ? NcclResult::internal_error
                                                               : NcclResult::system_error;
      const auto kind =
          result == NcclResult::system_error ? FailureKind::peer_lost : FailureKind::error;
      run(
          "cannot connect", options_of(3),
          [&](Rank& me) {
            if (me.rank == needing) {
              const Tensor mine({4}, 1);
              failure_text(kind, [&] { me.p2p({mine.to(needing == 1 ? 0 : 1)}); });
            }
            const FailurePtr failure = failure_of(me);
            EXPECT(failure->kind == kind && failure->origin_rank == std::max(1, needing));
            EXPECT(contains(failure->message, "connecting NCCL failed: " + failing) &&
                   contains(failure->message, "NCCL_DEBUG=INFO"));
          },
          nullptr,
          [&](const std::string& call, int rank) {
            return call == failing && rank == 1 ? result : NcclResult::success;
          });
    }
  }
}

// Claims from another version, or another world.
void claims_without_sense() {
  const Descriptor valid{.op = OpCode::connect};
  std::vector<std::pair<Descriptor, size_t>> claims{{valid, 1}, {valid, 256}};
  claims.push_back({valid, 0});
  claims.back().first.channel = kControlChannel;
  claims.push_back({valid, 128});
  claims.back().first.signature = 1;  // ids of one direction only
  claims.push_back({valid, 128});     // ids of the collectives, from a rank that is not the root
  claims.back().first.signature = claims.back().first.num_dims = 1;
  claims.back().first.channel = kCollectiveChannel;
  for (const uint64_t word : {3, 9}) {  // to go, from a rank that is not the root; nothing
    claims.push_back({valid, 0});
    claims.back().first.signature = word;
  }
  claims.push_back({{.op = OpCode::close}, 0});
  claims.back().first.signature = Links::kMeeting;
  claims.back().first.seq = 77;
  for (const auto& [claim, num_bytes] : claims) {
    run("no sense", options_of(2), [&](Rank& me) {
      const std::vector<std::byte> note(num_bytes);
      if (me.rank == 1) me.comm->claim(0, Direction::send, claim, note);
      EXPECT(contains(failure_of(me)->message, "says of NCCL what this rank does not understand"));
    });
  }
}

}  // namespace

int main() {
  only_ranks_that_need_each_other();
  the_other_user_sleeps();
  connecting_early();
  everybody_at_once();
  more_lanes_than_run_at_once();
  exchanges_of_some_ranks();
  a_first_use_in_a_capture();
  connecting_beside_a_capture();
  a_peer_that_has_closed();
  a_peer_that_closes_meanwhile();
  connecting_and_closing();
  nccl_cannot_connect();
  claims_without_sense();
  return check::report("device_links");
}
