// The window of a segment: what peers write there after the communicator has failed, and its results in forked
// children.

#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "meeting.h"
#include "transport/shm/window.h"

using namespace meeting;

constexpr int64_t kMiB = 1 << 20;
constexpr int64_t kPage = shm::kPageBytes;

// A segment of rank 0 as it maps it, and as a peer does.
struct TwoMappings {
  explicit TwoMappings(int64_t window_bytes) : shape(shape_of(2, window_bytes)) {}
  std::byte* of_peer(const std::byte* result) const {
    return peer->window() + (result - own->window());
  }

  const shm::SegmentShape shape;
  const shm::SegmentPtr own = shm::Segment::create(0, shape);
  const shm::SegmentPtr peer = shm::Segment::open({getpid(), own->fd(), own->inode()}, 0, shape);
  shm::WindowPool pool{own};
};

bool holds(const std::byte* data, int64_t num_bytes, int value) {
  return std::all_of(data, data + num_bytes,
                     [value](std::byte byte) { return byte == std::byte(value); });
}

RequestPtr recv_of(std::byte* data, int64_t num_bytes) {
  Descriptor descriptor;
  descriptor.num_bytes = num_bytes;
  return make_request(Direction::recv, 1, descriptor, data);
}

int64_t bytes_in_use(const shm::Segment& segment) {
  struct stat facts{};
  fstat(segment.fd(), &facts);
  return facts.st_blocks * 512;
}

TEST(the_end_takes_no_more_memory) {
  TwoMappings mappings(8 * kMiB);
  auto result = mappings.pool.allocate(4 * kMiB), other = mappings.pool.allocate(kMiB);
  std::memset(result.get(), 1, 4 * kMiB);
  std::memset(other.get(), 1, kMiB);
  const RequestPtr recvs[] = {recv_of(result.get(), kMiB), recv_of(result.get() + 2 * kMiB, kMiB)};
  mappings.pool.end(recvs);
  CHECK(holds(result.get(), 4 * kMiB, 1));
  const int64_t in_use = bytes_in_use(*mappings.own);
  CHECK(in_use >= 3 * kMiB && in_use < 4 * kMiB);
  result.reset();  // with private and shared pages in turn
  CHECK(bytes_in_use(*mappings.own) < 2 * kMiB);
  CHECK(holds(other.get(), kMiB, 1));
}

TEST(a_fork_leaves_pages_without_memory_that_nobody_has_written) {
  TwoMappings mappings(8 * kMiB);
  const auto result = mappings.pool.allocate(8 * kMiB);
  for (const int64_t at : {int64_t{0}, 3 * kMiB, 8 * kMiB - kPage})
    std::memset(result.get() + at, 1, kPage);
  const pid_t child = fork();
  if (child == 0)
    _exit(holds(result.get(), kPage, 1) && holds(result.get() + kPage, 3 * kMiB - kPage, 0) &&
                  holds(result.get() + 3 * kMiB, kPage, 1) &&
                  holds(result.get() + 8 * kMiB - kPage, kPage, 1)
              ? 0
              : 1);
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child && status == 0);
  CHECK(bytes_in_use(*mappings.own) < kMiB);
}

TEST(what_peers_write_after_the_end) {
  TwoMappings mappings(4 * kMiB);
  auto granted = mappings.pool.allocate(kMiB), other = mappings.pool.allocate(kMiB);
  std::memset(granted.get(), 1, kMiB);
  std::memset(other.get(), 1, kMiB);
  std::byte* const data = granted.get();
  // Receives of parts of one tensor, whose pages overlap; the last pages are in no receive.
  const RequestPtr recvs[] = {recv_of(data + 100'000, 200'000), recv_of(data + kPage + 7, 150'000)};
  mappings.pool.end(recvs);
  std::memset(mappings.of_peer(data), 2, kMiB);
  std::memset(mappings.of_peer(other.get()), 2, kMiB);
  const int64_t end = (300'000 + kPage - 1) / kPage * kPage;
  CHECK(holds(data, kPage, 2));
  CHECK(holds(data + kPage, end - kPage, 1));
  CHECK(holds(data + end, kMiB - end, 2));
  CHECK(holds(other.get(), kMiB, 2));

  std::memset(data, 3, kMiB);
  mappings.pool.end(recvs);  // as when a communicator that has failed is closed
  CHECK(holds(data, kMiB, 3));
  CHECK(mappings.pool.allocate(kMiB) == nullptr);
  granted.reset();
  CHECK(mappings.pool.allocate(kMiB) == nullptr);
  CHECK(holds(other.get(), kMiB, 2));
}

// The rest of a tensor may belong to another thread.
TEST(the_end_loses_no_write_of_another_thread) {
  for (int round = 0; round < check::rounds(20); ++round) {
    TwoMappings mappings(4 * kMiB);
    const auto result = mappings.pool.allocate(4 * kMiB);
    std::memset(result.get(), 1, 4 * kMiB);
    const RequestPtr recv = recv_of(result.get() + 8, 4 * kMiB - 16);
    volatile auto* const first = reinterpret_cast<int64_t*>(result.get());
    volatile auto* const last = reinterpret_cast<int64_t*>(result.get() + 4 * kMiB - 8);
    *first = 0;
    *last = 0;
    std::atomic<bool> ended{false};
    std::latch start(2);
    std::thread writer([&] {
      start.arrive_and_wait();
      for (int64_t count = 1; !ended; ++count) {
        *first = *first + 1;
        *last = *last + 1;
        CHECK(*first == count && *last == count);
      }
    });
    start.arrive_and_wait();
    mappings.pool.end({&recv, 1});
    ended = true;
    writer.join();
  }
}

// Runs `body` in a forked child, which ends with the number of checks that fail there.
template <typename Body>
pid_t fork_with(const Body& body) {
  const pid_t child = fork();
  if (child != 0) return child;
  check::num_failures = 0;
  body();
  std::fflush(stdout);
  _exit(check::num_failures);
}
bool succeeds(pid_t child) {
  int status = -1;
  return waitpid(child, &status, 0) == child && status == 0;
}

TEST(a_forked_child_has_results_of_its_own) {
  TwoMappings one(4 * kMiB), other(4 * kMiB);
  auto first = one.pool.allocate(kMiB), hole = one.pool.allocate(kMiB),
       second = one.pool.allocate(kMiB);
  const auto third = other.pool.allocate(4 * kMiB);  // all of it
  hole.reset();
  std::memset(first.get(), 1, kMiB);
  std::memset(second.get(), 2, kMiB);
  std::memset(third.get(), 3, 4 * kMiB);
  int changed[2];
  CHECK_EQ(pipe(changed), 0);
  const auto child = fork_with([&] {
    char byte;
    CHECK_EQ(read(changed[0], &byte, 1), 1);
    const auto check_all = [&] {
      CHECK(holds(first.get(), kMiB, 1));
      CHECK(holds(second.get(), kMiB, 2));
      CHECK(holds(third.get(), 4 * kMiB, 3));
    };
    check_all();
    CHECK(succeeds(fork_with([&] {
      check_all();
      std::memset(third.get(), 9, 4 * kMiB);
    })));
    check_all();
    CHECK(one.pool.allocate(kMiB) == nullptr && other.pool.allocate(kMiB) == nullptr);
    first.reset();
    std::memset(second.get(), 9, kMiB);
    std::memset(third.get(), 9, 4 * kMiB);
  });
  std::memset(one.of_peer(first.get()), 5, kMiB);
  std::memset(second.get(), 6, kMiB);
  CHECK_EQ(write(changed[1], "x", 1), 1);
  CHECK(succeeds(child));
  close(changed[0]);
  close(changed[1]);
  CHECK(holds(first.get(), kMiB, 5));
  CHECK(holds(second.get(), kMiB, 6));
  CHECK(holds(one.of_peer(second.get()), kMiB, 6));
  CHECK(holds(third.get(), 4 * kMiB, 3));
  CHECK(one.pool.allocate(kMiB) != nullptr);
}

TEST(forks_while_threads_allocate) {
  TwoMappings mappings(2 * kMiB);
  std::atomic<bool> stops{false};
  std::vector<std::thread> threads;
  for (int idx = 0; idx < 2; ++idx)
    threads.emplace_back([&] {
      while (!stops) mappings.pool.allocate(kMiB / 4);
    });
  for (int round = 0; round < check::rounds(100); ++round) {
    auto result = mappings.pool.allocate(kMiB);
    if (!result) continue;
    std::memset(result.get(), 1, kMiB);
    CHECK(succeeds(fork_with([&] {
      CHECK(holds(result.get(), kMiB, 1));
      result.reset();
      CHECK(mappings.pool.allocate(kMiB) == nullptr);
    })));
  }
  stops = true;
  for (std::thread& thread : threads) thread.join();
}
