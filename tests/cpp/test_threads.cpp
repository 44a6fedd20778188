// Threads that the system does not give: the caller is told, and its peers too, or it does the work
// itself. The module's objects have no such faults, so this runs in builds of these tests alone.
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "engine/communicator.h"
#include "meeting.h"
#include "message/start_thread.h"
#include "plan/builders.h"
#include "plan/reshard.h"

namespace {

using namespace pipecomm;
using namespace std::chrono_literals;

#ifdef PIPECOMM_FAULTS

constexpr const char* kText = "cannot start a thread: Resource temporarily unavailable; raise";

// Two ranks over shared memory, made and used by this thread.
struct Pair {
  static constexpr shm::SegmentShape kShape{
      .size = 2, .num_channels = 2, .ring_bytes = 64 << 10, .window_bytes = 0, .epoch = 1};
  std::vector<shm::SegmentPtr> segments{shm::Segment::create(0, kShape),
                                        shm::Segment::create(1, kShape)};

  std::unique_ptr<Communicator> make(int rank) const {
    const CommunicatorOptions options{.rank = rank, .size = 2, .num_channels = 2, .timeout = 60s};
    return std::make_unique<Communicator>(options, [&](TransportEvents& events) {
      return meeting::over_same_memory(segments, rank, events);
    });
  }
};

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const PipeCommException& error) {
    return error.failure()->message;
  }
  return "";
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// Rank 1 cannot be made: it says why, and what rank 0 has posted ends with that reason.
void test_constructors() {
  int num_faults = 0;
  for (int nth = 1;; ++nth) {
    check::context = "thread " + std::to_string(nth) + " of a communicator";
    const Pair pair;
    const auto rank0 = pair.make(0);
    std::byte byte{};
    const TensorRef tensor{&byte, {0, 1}, {1}, {1}, nullptr};
    const PointToPoint recv{Direction::recv, 1, 0, tensor};
    const OperationPtr posted = rank0->batch_p2p({&recv, 1});
    failing_thread = nth;
    std::unique_ptr<Communicator> rank1;
    const std::string error = error_of([&] { rank1 = pair.make(1); });
    failing_thread = 0;
    if (rank1) break;
    ++num_faults;
    CHECK(contains(error, kText));
    const auto begin = Clock::now();
    CHECK(contains(error_of([&] { rank0->wait(*posted, Deadline::max(), nullptr); }),
                   std::string("communicator failed on rank 1: ") + kText));
    CHECK(Clock::now() - begin < 10s);
    rank0->close(nullptr);
  }
  CHECK_EQ(num_faults, 2);
}

// An exchange that follows another one is posted by its caller, once that one is done.
void test_what_follows_without_a_thread() {
  check::context = "what follows, without a thread";
  const Pair pair;
  std::vector<std::unique_ptr<Communicator>> ranks;
  for (int rank : {0, 1}) ranks.push_back(pair.make(rank));
  std::vector<std::thread> threads;
  for (int rank : {0, 1}) {
    threads.emplace_back([&, rank] {
      Communicator& comm = *ranks[rank];
      const TensorSpec whole{{8}, dtypes::kUInt8};
      const auto plan = [&](int from, int to) {
        return std::make_shared<PreparedExchange>(
            reshard_plan({rank, 2}, whole, {{from}, {}, true}, {{to}, {}, true}));
      };
      std::vector<std::byte> bytes(8, std::byte{static_cast<uint8_t>(rank == 0 ? 7 : 0)});
      const TensorRef tensor{bytes.data(), {0, 1}, {8}, {1}, nullptr};
      const auto ends = [&](bool reads) {
        return reads ? std::span<const TensorRef>(&tensor, 1) : std::span<const TensorRef>();
      };
      const auto hop = [&](int from, int to, int channel, const OperationPtr& after) {
        return comm.exchange(OpCode::relay, plan(from, to), ends(rank == from), ends(rank == to),
                             {}, {{}, channel}, after);
      };
      if (rank == 0) std::this_thread::sleep_for(100ms);  // rank 1 asks for the second hop first
      const OperationPtr first = hop(0, 1, 0, nullptr);
      if (rank == 0) std::fill(bytes.begin(), bytes.end(), std::byte{7});
      failing_thread = 1;
      const OperationPtr second = rank == 1 ? hop(1, 0, 1, first) : hop(1, 0, 1, nullptr);
      failing_thread = 0;
      comm.wait(*second, Deadline::max(), nullptr);
      for (const std::byte byte : bytes) CHECK(byte == std::byte{7});
      comm.close(nullptr);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

void run() {
  test_constructors();
  test_what_follows_without_a_thread();
}

#else

void run() { std::printf("built without PIPECOMM_FAULTS\n"); }

#endif

}  // namespace

int main() {
  run();
  return check::report("test_threads");
}
