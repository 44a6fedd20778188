// The shared-memory transport with threads as ranks: every rank maps the same segments, so that the
// sanitizers see both ends of every word.
#include <chrono>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "engine/communicator.h"
#include "meeting.h"
#include "plan/builders.h"

namespace {

using namespace pipecomm;
using namespace std::chrono_literals;

constexpr DType kByte{0, 1};
constexpr auto kLimit = 60s;

shm::SegmentShape shape_of(int size, int num_channels, int64_t ring_bytes,
                           int64_t window_bytes = 0) {
  return {.size = size,
          .num_channels = num_channels,
          .ring_bytes = ring_bytes,
          .window_bytes = window_bytes,
          .epoch = 7};
}

// Runs `body` on every rank, each a thread with a communicator over the same segments.
void run_ranks(const shm::SegmentShape& shape, const std::function<void(Communicator&)>& body,
               std::chrono::nanoseconds timeout = kLimit) {
  std::vector<shm::SegmentPtr> segments;
  for (int rank = 0; rank < shape.size; ++rank)
    segments.push_back(shm::Segment::create(rank, shape));
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < shape.size; ++rank) {
    ranks.emplace_back([&, rank] {
      const CommunicatorOptions options{
          .rank = rank, .size = shape.size, .num_channels = shape.num_channels, .timeout = timeout};
      Communicator comm(options, [&](TransportEvents& events) {
        return meeting::over_same_memory(segments, rank, events);
      });
      try {
        body(comm);
        comm.close(nullptr);
      } catch (const std::exception& error) {
        check::fail(__FILE__, __LINE__, error.what());
        comm.abort(error.what());
      }
    });
  }
  for (std::thread& rank : ranks) rank.join();
}

void wait(Communicator& comm, const OperationPtr& operation) {
  comm.wait(*operation, Deadline::max(), nullptr);
}

using Bytes = std::vector<std::byte>;

TensorRef tensor(Bytes& bytes) {
  return {bytes.data(), kByte, {static_cast<int64_t>(bytes.size())}, {1}, nullptr};
}

std::byte coded(uint64_t key, size_t position) {
  uint64_t hash = key * 0x9e3779b97f4a7c15u + position * 0xbf58476d1ce4e5b9u;
  hash ^= hash >> 31;
  return static_cast<std::byte>(hash * 0x94d049bb133111ebu >> 56);
}

Bytes coded_bytes(uint64_t key, int64_t num_bytes) {
  Bytes bytes(static_cast<size_t>(num_bytes));
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = coded(key, i);
  return bytes;
}

// ---- random programs ---------------------------------------------------------------------------

// One step of a program: a message, or a collective of all ranks.
struct Step {
  OpCode op = OpCode::p2p;
  int source = 0, destination = 0, channel = 0;
  int64_t num_bytes = 0;
  uint64_t key = 0;
};

struct Program {
  shm::SegmentShape shape;
  std::vector<Step> steps;

  explicit Program(uint64_t seed) {
    std::mt19937_64 random(seed);
    auto draw = [&random](int64_t low, int64_t high) {
      return std::uniform_int_distribution<int64_t>(low, high)(random);
    };
    const int size = static_cast<int>(draw(2, 4));
    const int num_channels = static_cast<int>(draw(1, 3));
    shape = shape_of(size, num_channels, int64_t{64 << 10} << draw(0, 2));
    static constexpr int64_t kSizes[] = {
        0, 1, 127, 128, 129, 4096, 16384, 16384 + 1, 64 << 10, (64 << 10) + 64, 200000};
    for (int64_t num_steps = draw(1, 30); num_steps > 0; --num_steps) {
      Step step;
      const int64_t kind = draw(0, 9);
      step.op = kind == 0 ? OpCode::barrier : kind == 1 ? OpCode::broadcast : OpCode::p2p;
      step.source = static_cast<int>(draw(0, size - 1));
      step.destination = static_cast<int>((step.source + draw(1, size - 1)) % size);
      step.channel = static_cast<int>(draw(0, num_channels - 1));
      step.num_bytes = draw(0, 2) > 0 ? kSizes[draw(0, std::size(kSizes) - 1)] : draw(0, 300000);
      step.key = random();
      steps.push_back(step);
    }
  }
};

// Plays this rank's part: point-to-point steps in random batches, everything waited for late.
void play(const Program& program, uint64_t seed, Communicator& comm) {
  std::mt19937_64 random(seed * 31 + static_cast<uint64_t>(comm.rank()));
  struct Received {
    const Step* step;
    std::shared_ptr<Bytes> bytes;
  };
  std::vector<Received> received;
  std::vector<OperationPtr> operations;
  std::vector<PointToPoint> batch;
  auto post_batch = [&] {
    if (!batch.empty()) operations.push_back(comm.batch_p2p(batch));
    batch.clear();
  };
  auto owned = [](const std::shared_ptr<Bytes>& bytes) {
    TensorRef ref = tensor(*bytes);
    ref.storage = bytes;
    return ref;
  };
  for (const Step& step : program.steps) {
    const bool sends = step.source == comm.rank();
    const bool takes_part = step.op != OpCode::p2p || sends || step.destination == comm.rank();
    if (!takes_part) continue;
    auto bytes = std::make_shared<Bytes>(sends ? coded_bytes(step.key, step.num_bytes)
                                               : Bytes(static_cast<size_t>(step.num_bytes)));
    if (!sends && step.op != OpCode::barrier) received.push_back({&step, bytes});
    if (step.op == OpCode::barrier) {
      post_batch();
      operations.push_back(comm.barrier());
    } else if (step.op == OpCode::broadcast) {
      operations.push_back(comm.broadcast(owned(bytes), step.source));
    } else {
      batch.push_back({sends ? Direction::send : Direction::recv,
                       sends ? step.destination : step.source, step.channel, owned(bytes)});
    }
    if (random() % 3 == 0) post_batch();
    if (random() % 16 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 200));
  }
  post_batch();
  std::shuffle(operations.begin(), operations.end(), random);
  for (const OperationPtr& operation : operations) wait(comm, operation);
  for (const auto& [step, bytes] : received)
    CHECK(*bytes == coded_bytes(step->key, step->num_bytes));
}

void test_random_programs(uint64_t num_programs) {
  for (uint64_t seed = 0; seed < num_programs && check::num_failures == 0; ++seed) {
    check::context = "program " + std::to_string(seed);
    const Program program(seed);
    run_ranks(program.shape, [&](Communicator& comm) { play(program, seed, comm); });
  }
}

// ---- single cases ------------------------------------------------------------------------------

void test_large_messages_both_ways_between_all_pairs(int64_t num_bytes) {
  check::context = "large messages both ways";
  run_ranks(shape_of(4, 1, 64 << 10), [&](Communicator& comm) {
    std::vector<Bytes> sent(4), received(4, Bytes(static_cast<size_t>(num_bytes)));
    std::vector<PointToPoint> batch;
    for (int peer = 0; peer < comm.size(); ++peer) {
      if (peer == comm.rank()) continue;
      sent[peer] = coded_bytes(static_cast<uint64_t>(comm.rank() * 4 + peer), num_bytes);
      batch.push_back({Direction::send, peer, 0, tensor(sent[peer])});
      batch.push_back({Direction::recv, peer, 0, tensor(received[peer])});
    }
    wait(comm, comm.batch_p2p(batch));
    for (int peer = 0; peer < comm.size(); ++peer)
      if (peer != comm.rank())
        CHECK(received[peer] ==
              coded_bytes(static_cast<uint64_t>(peer * 4 + comm.rank()), num_bytes));
  });
}

// Granted payloads are written in pieces, by the thread that waits and by the transport's own.
void test_large_messages_into_windows() {
  check::context = "large messages into windows";
  constexpr int64_t kNumBytes = (5 << 20) + 1;
  run_ranks(shape_of(3, 2, 64 << 10, 64 << 20), [](Communicator& comm) {
    for (uint64_t turn = 0; turn < 5; ++turn) {
      auto key = [turn](int source, int destination) {
        return (turn * 3 + uint64_t(source)) * 3 + uint64_t(destination);
      };
      std::vector<Bytes> sent(3);
      std::vector<std::shared_ptr<std::byte>> received(3);
      std::vector<PointToPoint> batch;
      for (int peer = 0; peer < comm.size(); ++peer) {
        if (peer == comm.rank()) continue;
        const int channel = (comm.rank() + peer) % 2;
        sent[peer] = coded_bytes(key(comm.rank(), peer), kNumBytes);
        received[peer] = comm.allocate_result(kNumBytes);
        batch.push_back({Direction::send, peer, channel, tensor(sent[peer])});
        batch.push_back({Direction::recv,
                         peer,
                         channel,
                         {received[peer].get(), kByte, {kNumBytes}, {1}, received[peer]}});
      }
      wait(comm, comm.batch_p2p(batch));
      for (int peer = 0; peer < comm.size(); ++peer) {
        if (peer == comm.rank()) continue;
        const Bytes expected = coded_bytes(key(peer, comm.rank()), kNumBytes);
        CHECK(std::memcmp(received[peer].get(), expected.data(), expected.size()) == 0);
      }
    }
  });
}

// Once an operation has failed its tensors may be freed: no thread may still read them.
void test_an_abort_waits_for_those_who_write() {
  std::mt19937_64 random(5);
  for (int round = 0; round < 40; ++round) {
    check::context = "abort while writing, round " + std::to_string(round);
    const auto delay = std::chrono::microseconds(random() % 3000);
    run_ranks(shape_of(2, 1, 64 << 10, 64 << 20), [&](Communicator& comm) {
      constexpr int64_t kNumBytes = 16 << 20;
      const bool sends = comm.rank() == 0;
      const auto window = sends ? nullptr : comm.allocate_result(kNumBytes);
      auto heap = std::make_unique<Bytes>(sends ? kNumBytes : 0);
      const PointToPoint op{sends ? Direction::send : Direction::recv,
                            1 - comm.rank(),
                            0,
                            {sends ? heap->data() : window.get(), kByte, {kNumBytes}, {1}, window}};
      std::thread aborts;
      try {
        wait(comm, comm.barrier());
        const OperationPtr operation = comm.batch_p2p({&op, 1});
        if (sends)
          aborts = std::thread([&] {
            std::this_thread::sleep_for(delay);
            comm.abort("enough");
          });
        wait(comm, operation);
      } catch (const PipeCommException& error) {
        CHECK(error.failure()->message.find("enough") != std::string::npos);
      }
      heap.reset();
      if (aborts.joinable()) aborts.join();
    });
  }
}

// What a thread waits for may be posted later, by another one: when its route is made, or its turn in
// a sequence has come. The peer must wake the thread then. Nothing but the peer can, without a tick.
void test_a_thread_that_waits_hears_of_later_posts() {
  check::context = "posted later";
  struct : TransportEvents {
    void on_peer_lost(int, const std::string&) override {}
    void on_remote_failure(const Failure&) override {}
    void on_refused(int, const std::string&) override {}
    void on_broken(const std::string&) override {}
  } events;
  std::vector<shm::SegmentPtr> segments;
  for (int rank = 0; rank < 2; ++rank)
    segments.push_back(shm::Segment::create(rank, shape_of(2, 1, 64 << 10)));
  const auto receiver = meeting::over_same_memory(segments, 0, events);
  const auto sender = meeting::over_same_memory(segments, 1, events);
  const auto post = [](HostTransport& transport, const OperationPtr& operation) {
    const std::vector<RequestPtr> requests = operation->seal();
    for (const RequestPtr& request : requests) request->operation = operation;
    transport.post(requests, true);
    operation->note_posted();
  };
  int num_woken = 0;
  constexpr int kRounds = 20;
  for (int round = 0; round < kRounds; ++round) {
    Bytes sent = coded_bytes(round, 100), received(100);
    const auto recv = std::make_shared<Operation>(OpCode::p2p, Deadline::max());
    const auto send = std::make_shared<Operation>(OpCode::p2p, Deadline::max());
    const Descriptor descriptor = describe(OpCode::p2p, 0, tensor(sent), 0, 100);
    recv->add_request(Direction::recv, 1, descriptor, received.data());
    send->add_request(Direction::send, 0, descriptor, sent.data());
    std::thread others([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      post(*receiver, recv);
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      post(*sender, send);
    });
    num_woken += receiver->assist(*recv);
    others.join();
    while (!receiver->assist(*recv)) {
    }
    CHECK(received == sent);
  }
  CHECK(num_woken >= kRounds / 2);  // not all: threads may be late
  for (const auto& transport : {receiver.get(), sender.get()}) transport->begin_close();
  for (const auto& transport : {receiver.get(), sender.get()})
    transport->close(Clock::now() + kLimit);
}

void test_unmatched_messages_hold_up_only_their_channel() {
  check::context = "unmatched messages";
  run_ranks(shape_of(2, 2, 64 << 10), [](Communicator& comm) {
    constexpr int kNumMessages = 100;  // many times the ring
    const bool sends = comm.rank() == 0;
    std::vector<Bytes> bulk;
    for (int i = 0; i < kNumMessages; ++i)
      bulk.push_back(sends ? coded_bytes(static_cast<uint64_t>(i), 16 << 10) : Bytes(16 << 10));
    Bytes small = sends ? coded_bytes(99, 8) : Bytes(8);
    std::vector<PointToPoint> messages;
    const Direction direction = sends ? Direction::send : Direction::recv;
    for (Bytes& bytes : bulk) messages.push_back({direction, 1 - comm.rank(), 0, tensor(bytes)});
    const PointToPoint urgent{direction, 1 - comm.rank(), 1, tensor(small)};
    if (sends) {
      const OperationPtr sent = comm.batch_p2p(messages);
      wait(comm, comm.batch_p2p({&urgent, 1}));
      CHECK(!sent->done());
      wait(comm, comm.barrier());
      wait(comm, sent);
    } else {
      wait(comm, comm.batch_p2p({&urgent, 1}));
      CHECK(small == coded_bytes(99, 8));
      wait(comm, comm.barrier());
      wait(comm, comm.batch_p2p(messages));
      for (int i = 0; i < kNumMessages; ++i)
        CHECK(bulk[i] == coded_bytes(static_cast<uint64_t>(i), 16 << 10));
    }
  });
}

std::string failure_text(Communicator& comm, const OperationPtr& operation, FailureKind kind) {
  try {
    wait(comm, operation);
  } catch (const PipeCommException& error) {
    CHECK_EQ(static_cast<int>(error.failure()->kind), static_cast<int>(kind));
    return error.what();
  }
  check::fail(__FILE__, __LINE__, "nothing was raised");
  return "";
}

void test_mismatches_are_told_on_both_ends() {
  const std::vector<std::pair<int, int>> cases{{4, 8},      {8, 4},      {0, 4},
                                               {200000, 4}, {4, 200000}, {200000, 200001}};
  for (const auto& [num_sent, num_expected] : cases) {
    check::context = "mismatch " + std::to_string(num_sent) + " " + std::to_string(num_expected);
    run_ranks(shape_of(2, 1, 64 << 10), [&](Communicator& comm) {
      const bool sends = comm.rank() == 0;
      for (int turn = 0; turn < 3; ++turn) {  // and the communicator stays usable
        Bytes bytes(static_cast<size_t>(sends ? num_sent : num_expected));
        const PointToPoint op{sends ? Direction::send : Direction::recv, 1 - comm.rank(), 0,
                              tensor(bytes)};
        const std::string text =
            failure_text(comm, comm.batch_p2p({&op, 1}), FailureKind::mismatch);
        CHECK(text.find(std::to_string(num_sent)) != std::string::npos);
        CHECK(text.find(std::to_string(num_expected)) != std::string::npos);
        CHECK(bytes == Bytes(bytes.size()));
      }
      Bytes good = sends ? coded_bytes(5, 100000) : Bytes(100000);
      const PointToPoint op{sends ? Direction::send : Direction::recv, 1 - comm.rank(), 0,
                            tensor(good)};
      wait(comm, comm.batch_p2p({&op, 1}));
      CHECK(good == coded_bytes(5, 100000));
    });
  }
}

void test_refused_collectives_are_told_to_all() {
  for (const int64_t num_bytes : {8, 1000000}) {
    for (const int refusing : {0, 2}) {
      check::context = "rank " + std::to_string(refusing) + " refuses a broadcast of " +
                       std::to_string(num_bytes);
      run_ranks(shape_of(3, 1, 64 << 10), [&](Communicator& comm) {
        for (int turn = 0; turn < 2; ++turn) {
          Bytes bytes =
              comm.rank() == 0 ? coded_bytes(3, num_bytes) : Bytes(static_cast<size_t>(num_bytes));
          if (comm.rank() == refusing) {
            comm.refuse(OpCode::broadcast, "ValueError: not today");
          } else {
            const std::string text =
                failure_text(comm, comm.broadcast(tensor(bytes), 0), FailureKind::mismatch);
            CHECK(text.find("refused by rank " + std::to_string(refusing) +
                            ": ValueError: not today") != std::string::npos);
          }
          wait(comm, comm.broadcast(tensor(bytes), 0));
          CHECK(bytes == coded_bytes(3, num_bytes));
        }
      });
    }
  }
}

void test_what_can_no_longer_match_fails_when_a_rank_closes() {
  for (const int64_t num_bytes : {8, 1000000}) {
    check::context = "closing with messages of " + std::to_string(num_bytes);
    run_ranks(shape_of(3, 1, 64 << 10), [&](Communicator& comm) {
      if (comm.rank() == 0) return;
      Bytes bytes(static_cast<size_t>(num_bytes));
      const PointToPoint op{comm.rank() == 1 ? Direction::send : Direction::recv, 0, 0,
                            tensor(bytes)};
      const std::string text = failure_text(comm, comm.batch_p2p({&op, 1}), FailureKind::peer_lost);
      CHECK(text.find("rank 0 has closed its communicator") != std::string::npos);
    });
  }
}

void test_aborts_reach_all_ranks() {
  check::context = "abort";
  run_ranks(shape_of(3, 1, 64 << 10), [](Communicator& comm) {
    Bytes bytes(1000000);
    const PointToPoint op{Direction::recv, (comm.rank() + 1) % 3, 0, tensor(bytes)};
    const OperationPtr operation = comm.batch_p2p({&op, 1});
    const OperationPtr barrier = comm.barrier();
    if (comm.rank() == 1) {
      wait(comm, barrier);  // all have come this far; on the others it may be cut short
      comm.abort("enough");
    }
    const std::string text = failure_text(comm, operation, FailureKind::aborted);
    CHECK(text.find("aborted by rank 1: enough") != std::string::npos);
  });
}

// The peer's threads see its abort and its close at once, and must tell of the abort.
void test_a_close_does_not_overtake_an_abort() {
  for (int round = 0; round < 100; ++round) {
    check::context = "abort and close, round " + std::to_string(round);
    run_ranks(shape_of(2, 1, 64 << 10), [](Communicator& comm) {
      Bytes bytes(1000);
      const PointToPoint op{Direction::recv, 1 - comm.rank(), 0, tensor(bytes)};
      if (comm.rank() == 1) return comm.abort("enough");
      try {
        failure_text(comm, comm.batch_p2p({&op, 1}), FailureKind::aborted);
      } catch (const PipeCommException& error) {  // it was over before this rank began
        CHECK(error.failure()->message.find("enough") != std::string::npos);
      }
    });
  }
}

// All-to-all of [2, 24, 6] bytes, scattered and gathered along the given dims; results in ordinary
// memory or in windows, against indices computed here.
void test_exchanges(bool in_windows) {
  constexpr int kSize = 3;
  const Dims global{4, 3 * 64, 6 * 64};
  const std::vector<std::pair<int, int>> dims{{1, 2}, {2, 1}, {0, 2}, {1, 0}};
  for (const auto& [scatter_dim, gather_dim] : dims) {
    check::context = "exchange " + std::to_string(scatter_dim) + " " + std::to_string(gather_dim) +
                     (in_windows ? " in windows" : "");
    auto cut = [&](int dim, int rank) {  // remainder first
      const int64_t base = global[dim] / kSize, extra = global[dim] % kSize;
      const int64_t begin = rank * base + std::min<int64_t>(rank, extra);
      return std::pair{begin, base + (rank < extra ? 1 : 0)};
    };
    run_ranks(shape_of(kSize, 1, 64 << 10, in_windows ? 64 << 20 : 0), [&](Communicator& comm) {
      auto part = [&](int dim, const auto& visit) {
        Dims shape = global;
        const auto [begin, length] = cut(dim, comm.rank());
        shape[dim] = length;
        size_t position = 0;
        for (int64_t i = 0; i < shape[0]; ++i)
          for (int64_t j = 0; j < shape[1]; ++j)
            for (int64_t k = 0; k < shape[2]; ++k) {
              Dims index{i, j, k};
              index[dim] += begin;
              visit(position++,
                    static_cast<size_t>((index[0] * global[1] + index[1]) * global[2] + index[2]));
            }
        return shape;
      };
      auto strides = [](const Dims& shape) { return Dims{shape[1] * shape[2], shape[2], 1}; };
      Bytes input(1 << 20);
      const Dims in_shape = part(gather_dim, [&](size_t position, size_t global_position) {
        input[position] = coded(1, global_position);
      });
      const Dims out_shape = part(scatter_dim, [](size_t, size_t) {});
      const int64_t num_out = out_shape[0] * out_shape[1] * out_shape[2];
      Sizes scatter, gather;
      for (int rank = 0; rank < kSize; ++rank) {
        scatter.push_back(cut(scatter_dim, rank).second);
        gather.push_back(cut(gather_dim, rank).second);
      }
      const AllToAllTensor piece{{in_shape, kByte}, scatter, gather};
      const auto plan = std::make_shared<PreparedExchange>(all_to_all_plan(
          {comm.rank(), kSize}, {{{in_shape, kByte}, scatter, gather}}, scatter_dim, gather_dim));
      for (int turn = 0; turn < 3; ++turn) {
        auto memory = comm.allocate_result(num_out);
        CHECK_EQ(memory != nullptr, in_windows && num_out >= 64 << 10);
        Bytes ordinary(static_cast<size_t>(num_out));
        std::byte* out = memory ? memory.get() : ordinary.data();
        std::memset(out, 0xa5, static_cast<size_t>(num_out));
        const TensorRef in_ref{input.data(), kByte, in_shape, strides(in_shape), nullptr};
        const TensorRef out_ref{out, kByte, out_shape, strides(out_shape), memory};
        wait(comm, comm.exchange(OpCode::all_to_all, plan, {&in_ref, 1}, {&out_ref, 1}));
        bool same = true;
        part(scatter_dim, [&](size_t position, size_t global_position) {
          same &= out[position] == coded(1, global_position);
        });
        CHECK(same);
      }
    });
  }
}

void test_results_return_to_their_pool_and_outlive_the_transport() {
  check::context = "results";
  std::shared_ptr<std::byte> survivor;
  run_ranks(shape_of(2, 1, 64 << 10, 1 << 20), [&](Communicator& comm) {
    auto first = comm.allocate_result(512 << 10);
    std::byte* const address = first.get();
    auto second = comm.allocate_result(512 << 10);
    CHECK(second != nullptr);
    CHECK(comm.allocate_result(512 << 10) == nullptr);  // full
    first.reset();
    first = comm.allocate_result(100 << 10);
    CHECK(first.get() == address);
    first.reset();
    second.reset();
    auto all = comm.allocate_result(1 << 20);  // the pieces have been merged
    CHECK(all != nullptr);
    CHECK(comm.allocate_result(1000) == nullptr);  // too small to be worth it
    if (comm.rank() == 0) survivor = std::move(all);
  });
  std::memset(survivor.get(), 1, 1 << 20);
}

// ---- what a peer must not do --------------------------------------------------------------------

struct Ruin {
  const char* name;
  std::function<void(shm::Lane& lane, std::byte* ring)> act;
};

void test_nonsense_from_a_peer_is_an_error() {
  const auto record = [](std::byte* ring, const std::function<void(shm::RecordHeader&)>& change) {
    shm::RecordHeader header{};
    header.magic = shm::kRecordMagic;
    header.kind = shm::RecordKind::eager;
    header.epoch = 7;
    header.num_inline_bytes = 8;
    header.descriptor.num_bytes = 8;
    change(header);
    std::memcpy(ring, &header, sizeof header);
  };
  const auto with = [&](auto change) {
    return [=](shm::Lane& lane, std::byte* ring) {
      record(ring, change);
      lane.head.store(256);
    };
  };
  const std::vector<Ruin> ruins = {
      {"head beyond the ring", [](shm::Lane& lane, std::byte*) { lane.head.store(1 << 20); }},
      {"half a record",
       [&](shm::Lane& lane, std::byte* ring) {
         record(ring, [](shm::RecordHeader&) {});
         lane.head.store(128);
       }},
      {"magic", with([](shm::RecordHeader& header) { header.magic = 1; })},
      {"epoch", with([](shm::RecordHeader& header) { header.epoch = 8; })},
      {"kind", with([](shm::RecordHeader& header) { header.kind = shm::RecordKind(77); })},
      {"order", with([](shm::RecordHeader& header) { header.descriptor.seq = 3; })},
      {"negative", with([](shm::RecordHeader& header) { header.descriptor.num_bytes = -1; })},
      {"inline size", with([](shm::RecordHeader& header) { header.num_inline_bytes = 9; })},
      {"huge", with([](shm::RecordHeader& header) {
         header.num_inline_bytes = 1 << 30;
         header.descriptor.num_bytes = 1 << 30;
       })},
      {"landed", with([](shm::RecordHeader& header) { header.kind = shm::RecordKind::landed; })},
  };
  for (const Ruin& ruin : ruins) {
    check::context = std::string("nonsense: ") + ruin.name;
    const shm::SegmentShape shape = shape_of(2, 1, 64 << 10);
    const std::vector<shm::SegmentPtr> segments{shm::Segment::create(0, shape),
                                                shm::Segment::create(1, shape)};
    Communicator comm(
        {.rank = 0, .size = 2, .num_channels = 1, .timeout = kLimit},
        [&](TransportEvents& events) { return meeting::over_same_memory(segments, 0, events); });
    ruin.act(segments[0]->lane(1, 0), segments[0]->ring(1, 0));
    Bytes bytes(8);
    const PointToPoint op{Direction::recv, 1, 0, tensor(bytes)};
    std::string text;
    try {  // found by this very call, or while waiting
      text = failure_text(comm, comm.batch_p2p({&op, 1}), FailureKind::error);
    } catch (const PipeCommException& error) {
      text = error.what();
    }
    CHECK(text.find("transport failure") != std::string::npos);
  }
}

void test_a_grant_must_lie_in_the_window() {
  check::context = "grants";
  const auto segment = shm::Segment::create(0, shape_of(2, 1, 64 << 10, 1 << 20));
  const auto refused = [&](shm::WindowPart part, uint32_t num_parts = 1) {
    shm::Grant grant{shm::GrantKind::direct, num_parts, {}};
    grant.parts[0] = part;
    try {
      shm::WindowWriter writer(grant, *segment, 100000);
    } catch (const std::runtime_error&) {
      return true;
    }
    return false;
  };
  const StridedCopy rows{
      .run_bytes = 100, .num_dims = 1, .count = {1000}, .dst_stride_bytes = {1000}};
  auto with = [&](auto change) {
    shm::WindowPart part{0, 0, rows};
    change(part);
    return part;
  };
  CHECK(!refused({0, 0, rows}));
  CHECK(!refused({0, (1 << 20) - 999100, rows}));
  CHECK(refused({0, (1 << 20) - 999099, rows}));
  CHECK(refused({0, -1, rows}));
  CHECK(refused({1, 0, rows}));
  CHECK(refused({0, 0, rows}, 0));
  CHECK(refused({0, 0, rows}, 99));
  CHECK(refused(with([](shm::WindowPart& part) { part.copy.run_bytes = 0; })));
  CHECK(refused(with([](shm::WindowPart& part) { part.copy.run_bytes = -100; })));
  CHECK(refused(with([](shm::WindowPart& part) { part.copy.num_dims = 9; })));
  CHECK(refused(with([](shm::WindowPart& part) { part.copy.count[0] = 0; })));
  CHECK(refused(with([](shm::WindowPart& part) { part.copy.count[0] = INT64_MAX; })));
  CHECK(refused(with([](shm::WindowPart& part) { part.copy.dst_stride_bytes[0] = -8; })));
  CHECK(
      refused(with([](shm::WindowPart& part) { part.copy.dst_stride_bytes[0] = INT64_MAX / 2; })));
}

}  // namespace

int main(int argc, char** argv) {
  const uint64_t num_programs = argc > 1 ? std::stoull(argv[1]) : 1000;
  test_a_grant_must_lie_in_the_window();
  test_results_return_to_their_pool_and_outlive_the_transport();
  test_nonsense_from_a_peer_is_an_error();
  test_mismatches_are_told_on_both_ends();
  test_refused_collectives_are_told_to_all();
  test_what_can_no_longer_match_fails_when_a_rank_closes();
  test_aborts_reach_all_ranks();
  test_a_close_does_not_overtake_an_abort();
  test_a_thread_that_waits_hears_of_later_posts();
  test_unmatched_messages_hold_up_only_their_channel();
  test_large_messages_both_ways_between_all_pairs(1 << 20);
  test_large_messages_into_windows();
  test_an_abort_waits_for_those_who_write();
  test_exchanges(false);
  test_exchanges(true);
  test_random_programs(num_programs);
  return check::report("shm");
}
