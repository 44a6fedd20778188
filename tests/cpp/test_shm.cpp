// The shared-memory transport with threads as ranks: every rank maps the same segments, so that the
// sanitizers see both ends of every word.

#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "host_exchanges.h"
#include "listener.h"
#include "message/start_thread.h"
#include "plan/builders.h"
#include "plan/reshard.h"
#include "transport/process_watch.h"

using namespace meeting;

TEST(random_programs) {
  for (int seed = 0; seed < check::rounds(500) && check::num_failures == 0; ++seed) {
    check::context = "program " + std::to_string(seed);
    const Program program(seed, 4, 3, 300'000);
    run_ranks(shape_of(program.size, 0, program.num_channels, int64_t{64 << 10} << seed % 3),
              [&](Communicator& comm) { play(program, comm); });
  }
}

TEST(large_messages_both_ways_between_all_pairs) {
  run_ranks(shape_of(4), [](Communicator& comm) { exchange_with_all(comm, 1 << 20, 0); });
}

// Granted payloads are written in pieces, by the thread that waits and by the transport's own.
TEST(large_messages_into_windows) {
  run_ranks(shape_of(3, 64 << 20), [](Communicator& comm) {
    for (int turn = 0; turn < 5; ++turn) exchange_with_all(comm, (5 << 20) + 1, turn);
  });
}

// Once an operation has failed its tensors may be freed: no thread may still read them.
TEST(an_abort_in_the_middle_of_a_payload) {
  std::mt19937_64 random(5);
  for (int round = 0; round < check::rounds(40); ++round) {
    check::context = "abort while writing, round " + std::to_string(round);
    const auto delay = std::chrono::microseconds(random() % 3000);
    run_ranks(shape_of(2, 64 << 20), [&](Communicator& comm) {
      constexpr int64_t kNumBytes = 16 << 20;
      const bool sends = comm.rank() == 0;
      const auto window = sends ? nullptr : comm.transport().allocate_result(kNumBytes);
      auto heap = std::make_unique<Bytes>(sends ? kNumBytes : 0);
      const PointToPoint op{sends ? Direction::send : Direction::recv,
                            1 - comm.rank(),
                            0,
                            {sends ? heap->data() : window.get(), kByte, {kNumBytes}, {1}, window}};
      std::thread aborts;
      try {
        wait(comm, comm.barrier());
        const OperationPtr operation = comm.batch_p2p({&op, 1});
        if (comm.rank() == round % 2)
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

TEST(unmatched_messages_hold_up_only_their_channel) {
  run_ranks(shape_of(2), [](Communicator& comm) {
    constexpr int kNumMessages = 100;  // many times the ring
    const bool sends = comm.rank() == 0;
    std::vector<Bytes> bulk;
    for (int i = 0; i < kNumMessages; ++i)
      bulk.push_back(sends ? coded_bytes(uint64_t(i), 16 << 10) : Bytes(16 << 10));
    Bytes small = sends ? coded_bytes(99, 8) : Bytes(8);
    std::vector<PointToPoint> messages;
    const Direction direction = sends ? Direction::send : Direction::recv;
    for (Bytes& bytes : bulk) messages.push_back({direction, 1 - comm.rank(), 0, tensor(bytes)});
    if (sends) {
      const OperationPtr sent = comm.batch_p2p(messages);
      wait(comm, post(comm, direction, 1, small, 1));
      CHECK(!sent->done());
      wait(comm, comm.barrier());
      wait(comm, sent);
    } else {
      wait(comm, post(comm, direction, 0, small, 1));
      CHECK(small == coded_bytes(99, 8));
      wait(comm, comm.barrier());
      wait(comm, comm.batch_p2p(messages));
      for (int i = 0; i < kNumMessages; ++i) CHECK(bulk[i] == coded_bytes(uint64_t(i), 16 << 10));
    }
  });
}

TEST(mismatches_are_told_on_both_ends) {
  const std::vector<std::pair<int, int>> cases{{4, 8},      {8, 4},      {0, 4},
                                               {200000, 4}, {4, 200000}, {200000, 200001}};
  for (const auto& [num_sent, num_expected] : cases) {
    check::context = "mismatch " + std::to_string(num_sent) + " " + std::to_string(num_expected);
    run_ranks(shape_of(2), [&](Communicator& comm) {
      const bool sends = comm.rank() == 0;
      const Direction direction = sends ? Direction::send : Direction::recv;
      for (int turn = 0; turn < 3; ++turn) {  // and the communicator stays usable
        Bytes bytes(size_t(sends ? num_sent : num_expected));
        const FailurePtr failure =
            failure_of(comm, [&] { return post(comm, direction, 1 - comm.rank(), bytes); });
        says(failure, FailureKind::mismatch, std::to_string(num_sent));
        says(failure, FailureKind::mismatch, std::to_string(num_expected));
        CHECK(bytes == Bytes(bytes.size()));
      }
      Bytes good = sends ? coded_bytes(5, 100000) : Bytes(100000);
      wait(comm, post(comm, direction, 1 - comm.rank(), good));
      CHECK(good == coded_bytes(5, 100000));
    });
  }
}

TEST(refused_collectives_are_told_to_all) {
  for (const int64_t num_bytes : {8, 1000000}) {
    for (const int refusing : {0, 2}) {
      check::context = "rank " + std::to_string(refusing) + " refuses a broadcast of " +
                       std::to_string(num_bytes);
      run_ranks(shape_of(3), [&](Communicator& comm) {
        for (int turn = 0; turn < 2; ++turn) {
          Bytes bytes = comm.rank() == 0 ? coded_bytes(3, num_bytes) : Bytes(num_bytes);
          if (comm.rank() == refusing) {
            comm.refuse(OpCode::broadcast, "ValueError: not today");
          } else {
            says(failure_of(comm, [&] { return comm.broadcast(tensor(bytes), 0); }),
                 FailureKind::mismatch,
                 "refused by rank " + std::to_string(refusing) + ": ValueError: not today");
          }
          wait(comm, comm.broadcast(tensor(bytes), 0));
          CHECK(bytes == coded_bytes(3, num_bytes));
        }
      });
    }
  }
}

TEST(what_can_no_longer_match_fails_when_a_rank_closes) {
  for (const int64_t num_bytes : {8, 1000000}) {
    check::context = "closing with messages of " + std::to_string(num_bytes);
    run_ranks(shape_of(3), [&](Communicator& comm) {
      if (comm.rank() == 0) return;
      Bytes bytes(num_bytes);
      const Direction direction = comm.rank() == 1 ? Direction::send : Direction::recv;
      says(failure_of(comm, [&] { return post(comm, direction, 0, bytes); }),
           FailureKind::peer_lost, "rank 0 has closed its communicator");
    });
  }
}

TEST(aborts_reach_all_ranks) {
  run_ranks(shape_of(3), [](Communicator& comm) {
    Bytes bytes(1000000);
    const OperationPtr operation = post(comm, Direction::recv, (comm.rank() + 1) % 3, bytes);
    const OperationPtr barrier = comm.barrier();
    if (comm.rank() == 1) {
      wait(comm, barrier);  // all have come this far; on the others it may be cut short
      comm.abort("enough");
    }
    says(failure_of(comm, [&] { return operation; }), FailureKind::aborted,
         "aborted by rank 1: enough");
  });
}

// The peer's threads see the abort and the close at the same time, and must report the abort.
TEST(a_close_does_not_overtake_an_abort) {
  for (int round = 0; round < check::rounds(100); ++round) {
    check::context = "abort and close, round " + std::to_string(round);
    run_ranks(shape_of(2), [](Communicator& comm) {
      Bytes bytes(1000);
      if (comm.rank() == 1) return comm.abort("enough");
      says(failure_of(comm, [&] { return post(comm, Direction::recv, 1, bytes); }),
           FailureKind::aborted, "enough");
    });
  }
}

TEST(exchanges) {
  for (const int64_t window_bytes : {0, 64 << 20})
    for (const auto& [scatter_dim, gather_dim] :
         {std::pair{1, 2}, std::pair{2, 1}, std::pair{0, 2}, std::pair{1, 0}}) {
      check::context = "exchange " + std::to_string(scatter_dim) + " " +
                       std::to_string(gather_dim) + (window_bytes > 0 ? " in windows" : "");
      run_ranks(shape_of(3, window_bytes), [&](Communicator& comm) {
        all_to_all(comm, {4, 3 * 64, 6 * 64}, scatter_dim, gather_dim);
      });
    }
}

TEST(results_return_to_their_pool_and_outlive_the_transport) {
  std::shared_ptr<std::byte> survivor;
  run_ranks(shape_of(2, 1 << 20), [&](Communicator& comm) {
    auto first = comm.transport().allocate_result(512 << 10);
    std::byte* const address = first.get();
    auto second = comm.transport().allocate_result(512 << 10);
    CHECK(second != nullptr);
    CHECK(comm.transport().allocate_result(512 << 10) == nullptr);  // full
    first.reset();
    first = comm.transport().allocate_result(100 << 10);
    CHECK(first.get() == address);
    first.reset();
    second.reset();
    auto all = comm.transport().allocate_result(1 << 20);  // the pieces have been merged
    CHECK(all != nullptr);
    CHECK(comm.transport().allocate_result(1000) == nullptr);  // too small to be worth it
    if (comm.rank() == 0) survivor = std::move(all);
  });
  std::memset(survivor.get(), 1, 1 << 20);
}

struct Ruin {
  const char* name;
  std::function<void(shm::Lane& lane, std::byte* ring)> act;
};

TEST(nonsense_from_a_peer_is_an_error) {
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
      {"head within a record", [](shm::Lane& lane, std::byte*) { lane.head.store(64); }},
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
    const SameMemory memory(shape_of(2));
    const auto comm = memory.communicator(0);
    ruin.act(memory.segments[0]->lane(1, 0), memory.segments[0]->ring(1, 0));
    Bytes bytes(8);
    says(failure_of(*comm, [&] { return post(*comm, Direction::recv, 1, bytes); }),
         FailureKind::error, "transport failure");
  }
}

// After a rank has closed its memory, the file descriptor may be anything else. Each kind fails to
// open in another way, none of which may count as a machine without shared memory.
TEST(memory_that_is_gone) {
  const shm::SegmentShape shape = shape_of(2);
  auto segment = shm::Segment::create(0, shape);
  const shm::SegmentName name{getpid(), segment->fd(), segment->inode()};
  CHECK(shm::Segment::open(name, 0, shape) != nullptr);
  const auto error_of = [&](const shm::SegmentName& asked) {
    try {
      shm::Segment::open(asked, 0, shape);
    } catch (const std::system_error& error) {
      return error.code().value();
    }
    return 0;
  };
  const int others[] = {
      open("/proc/self/exe", O_RDONLY | O_CLOEXEC),            // cannot be opened to be written
      open("/", O_RDONLY | O_DIRECTORY | O_CLOEXEC),           // a directory
      socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0),          // cannot be opened
      eventfd(0, EFD_CLOEXEC),                                 // cannot be opened
      static_cast<int>(syscall(SYS_pidfd_open, getpid(), 0)),  // by some kernels not permitted
      memfd_create("another", MFD_CLOEXEC)};
  for (const int other : others) {
    CHECK(other >= 0);
    CHECK_EQ(error_of({name.pid, other, name.inode}), ENOENT);
    close(other);
  }
  segment.reset();
  CHECK_EQ(error_of(name), ENOENT);

  // A file that exists but cannot be used: the error gives the cause.
  const int read_only = open("/proc/self/exe", O_RDONLY | O_CLOEXEC);
  struct stat facts{};
  CHECK_EQ(fstat(read_only, &facts), 0);
  CHECK_EQ(error_of({name.pid, read_only, facts.st_ino}), ETXTBSY);
  close(read_only);
}

// Without root, the files of an ending process cannot be read.
TEST(a_process_that_is_ending) {
  CHECK(!is_ending(getpid()));
  const pid_t child = fork();
  if (child == 0) _exit(0);
  siginfo_t info{};
  CHECK_EQ(waitid(P_PID, id_t(child), &info, WEXITED | WNOWAIT), 0);
  CHECK(is_ending(child));
  CHECK_EQ(waitpid(child, nullptr, 0), child);
  CHECK(is_ending(child));
}

TEST(a_grant_must_lie_in_the_window) {
  const auto segment = shm::Segment::create(0, shape_of(2, 1 << 20));
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

#ifdef PIPECOMM_FAULTS

constexpr const char* kText = "cannot start a thread: Resource temporarily unavailable; raise";

// Rank 1 cannot be made: it reports why, and messages of rank 0 end with that reason.
TEST(constructors_without_a_thread) {
  int num_faults = 0;
  for (int nth = 1;; ++nth) {
    check::context = "thread " + std::to_string(nth) + " of a communicator";
    const SameMemory memory(shape_of(2));
    const auto rank0 = memory.communicator(0);
    std::byte byte{};
    const TensorRef tensor{&byte, {0, 1}, {1}, {1}, nullptr};
    const PointToPoint recv{Direction::recv, 1, 0, tensor};
    const OperationPtr posted = rank0->batch_p2p({&recv, 1});
    failing_thread = nth;
    std::unique_ptr<Communicator> rank1;
    std::string error;
    try {
      rank1 = memory.communicator(1);
    } catch (const PipeCommException& refused) {
      error = refused.what();
    }
    failing_thread = 0;
    if (rank1) break;
    ++num_faults;
    CHECK_CONTAINS(error, kText);
    const auto begin = Clock::now();
    says(failure_of(*rank0, [&] { return posted; }), FailureKind::error,
         std::string("communicator failed on rank 1: ") + kText);
    CHECK(Clock::now() - begin < 10s);
    rank0->close(nullptr);
  }
  CHECK_EQ(num_faults, 2);
}

// An exchange that follows another one is posted by its caller, once that one is done.
TEST(what_follows_without_a_thread) {
  run_ranks(shape_of(2), [](Communicator& comm) {
    const int rank = comm.rank();
    const TensorSpec whole{{8}, dtypes::kUInt8};
    const auto plan = [&](int from, int to) {
      return std::make_shared<PreparedExchange>(
          reshard_plan({rank, 2}, whole, {{from}, {}, true}, {{to}, {}, true}));
    };
    std::vector<std::byte> bytes(8, std::byte{uint8_t(rank == 0 ? 7 : 0)});
    const TensorRef tensor{bytes.data(), {0, 1}, {8}, {1}, nullptr};
    const auto ends = [&](bool reads) {
      return reads ? std::span<const TensorRef>(&tensor, 1) : std::span<const TensorRef>();
    };
    const auto hop = [&](int from, int to, int channel, const OperationPtr& after) {
      return comm.exchange(OpCode::relay, plan(from, to), ends(rank == from), ends(rank == to), {},
                           {{}, channel}, after);
    };
    if (rank == 0) std::this_thread::sleep_for(100ms);  // rank 1 asks for the second hop first
    const OperationPtr first = hop(0, 1, 0, nullptr);
    if (rank == 0) std::fill(bytes.begin(), bytes.end(), std::byte{7});
    failing_thread = 1;
    const OperationPtr second = rank == 1 ? hop(1, 0, 1, first) : hop(1, 0, 1, nullptr);
    failing_thread = 0;
    wait(comm, second);
    for (const std::byte byte : bytes) CHECK(byte == std::byte{7});
  });
}

#endif
