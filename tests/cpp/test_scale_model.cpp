// The cost of collectives and failures as a group grows to thousands of ranks: messages per rank
// and simulated time grow with log P, and a rank keeps no state that grows faster. Prints the table
// of docs/scale.md.
#include "scale_model.h"

#include "check.h"
#include "plan/signature.h"

using model::Course;
using model::Group;

int ceil_log2(int size) { return size <= 1 ? 0 : std::bit_width(unsigned(size - 1)); }

Statement of_barrier(int) { return {.common = 17}; }

// The messages of a halo exchange: with both neighbours in the ring of all ranks. `odd` expects
// other sizes than its neighbours.
Statement of_exchange(int rank, int size, int odd) {
  Statement statement{.common = 99};
  for (const int step : {1, size - 1}) {
    for (const Direction direction : {Direction::send, Direction::recv}) {
      Descriptor descriptor;
      descriptor.op = OpCode::exchange;
      descriptor.num_bytes = rank == odd ? 8 : 4;
      statement.add(rank, *make_request(direction, (rank + step) % size, descriptor, nullptr));
    }
  }
  return statement;
}

void check_cost(const Course& course, int size) {
  const int log = ceil_log2(size);
  CHECK(course.most_sent <= std::max(1, 2 * log));
  CHECK(course.mean_sent <= 2);
  CHECK(course.rounds <= 2 * log);
  CHECK(course.most_edges <= size_t(log) + 1);
}

// Every size up to 70, and some beyond: all ranks get one verdict, within the limit of messages.
TEST(agreement) {
  std::vector<int> sizes;
  for (int size = 1; size <= 70; ++size) sizes.push_back(size);
  for (const int size : {100, 127, 128, 129, 1000, 4095, 4096}) sizes.push_back(size);
  for (const int size : sizes) {
    check::context = "agreement of " + std::to_string(size);
    check_cost(Group(size).run(of_barrier), size);
    const Course agreed = Group(size).run([&](int rank) { return of_exchange(rank, size, -1); });
    CHECK_EQ(agreed.num_agreed, size);
    check_cost(agreed, size);
    if (size < 3) continue;
    for (const int odd : {0, 1, size / 2, size - 1}) {
      const Course differing =
          Group(size).run([&](int rank) { return of_exchange(rank, size, odd); });
      CHECK_EQ(differing.num_objecting, size);
      const Course refused = Group(size).run([&](int rank) {
        return rank == odd ? Statement::objection(1) : of_exchange(rank, size, -1);
      });
      CHECK_EQ(refused.num_objecting, size);
      check_cost(refused, size);
      const Course other_call =
          Group(size).run([&](int rank) { return Statement{.common = rank == odd ? 1u : 2u}; });
      CHECK_EQ(other_call.num_objecting, size);
    }
  }
}

// From every source, the payload reaches every rank once.
TEST(broadcast) {
  for (const int size : {1, 2, 3, 8, 13, 64, 100}) {
    for (int source = 0; source < size; ++source) {
      check::context = "broadcast, " + std::to_string(size) + " from " + std::to_string(source);
      const Course course = Group(size, source, 3 * kPieceBytes + 5).run(of_barrier);
      CHECK_EQ(course.num_agreed, size);
      CHECK_EQ(course.num_complete, size);
      CHECK(course.most_bytes <=
            (ceil_log2(size) + 1) * (3 * kPieceBytes + 5 + 20 * model::kHeaderBytes));
    }
  }
}

TEST(control_neighbours) {
  for (int size = 1; size <= 300; ++size) {
    check::context = "control neighbours of " + std::to_string(size);
    for (int rank = 0; rank < size; ++rank) {
      const auto neighbours = control_neighbours(rank, size);
      CHECK(int(neighbours.size()) <= std::max(0, 2 * ceil_log2(size)));
      for (const int peer : neighbours) {
        CHECK(peer >= 0 && peer < size && peer != rank);
        CHECK(std::ranges::binary_search(control_neighbours(peer, size), rank));  // both ways
      }
    }
  }
}

// One rank, some, and up to a quarter of all die at once. Returns the most rounds that were needed.
int failure_rounds(int size, int num_seeds) {
  int most = 0;
  for (int seed = 0; seed < num_seeds; ++seed) {
    check::context = "failure, " + std::to_string(size) + " ranks, seed " + std::to_string(seed);
    std::mt19937 random(seed);
    const int num_dead = seed % 3 == 0   ? 1
                         : seed % 3 == 1 ? 1 + int(random() % ceil_log2(size))
                                         : 1 + int(random() % (1 + size / 4));
    std::vector<bool> is_dead(size);
    for (int idx = 0; idx < std::min(num_dead, size - 1); ++idx) is_dead[random() % size] = true;
    const int rounds = model::rounds_of_failure(is_dead);
    CHECK(rounds >= 0 && rounds <= ceil_log2(size));
    most = std::max(most, rounds);
  }
  return most;
}

TEST(scale) {
  std::printf(
      "Model: hosts of %d ranks; 10 us and 4 GB/s inside, 30 us and 1.25 GB/s across; 3 us a "
      "message\n\n"
      "|    P | messages of a rank, most | mean | direct | rounds | barrier us | 4 KiB us | 1 MiB "
      "ms "
      "| rounds until all know of a failure |\n"
      "|-----:|---:|---:|---:|---:|---:|---:|---:|---:|\n",
      model::kRanksPerHost);
  struct Times {
    double barrier, small, large;
  };
  std::vector<Times> per_level;  // divided by log2 P
  for (int size = 2; size <= 4096; size *= 2) {
    const int log = ceil_log2(size);
    const Course barrier = Group(size).run(of_barrier);
    const Course small = Group(size, size / 2, 4 << 10).run(of_barrier);
    const Course large = Group(size, size / 2, 1 << 20).run(of_barrier);
    check::context = "scale, " + std::to_string(size);
    for (const Course& course : {small, large}) {
      CHECK_EQ(course.num_complete, size);
      CHECK(course.most_sent <= 2 * log + 1);
    }
    const int rounds = failure_rounds(size, size <= 256 ? 60 : 12);
    std::printf("| %4d | %lld | %.2f | %d | %d | %.0f | %.0f | %.2f | %d |\n", size,
                static_cast<long long>(barrier.most_sent), barrier.mean_sent, size - 1,
                barrier.rounds, barrier.seconds * 1e6, small.seconds * 1e6, large.seconds * 1e3,
                rounds);
    per_level.push_back({barrier.seconds / log, small.seconds / log, large.seconds / log});
  }
  // Each level costs the same, however many there are. From 64 ranks on, most of them are between
  // hosts; with times that go with P instead, the last would be thirty times the first.
  check::context = "time per level";
  const Times& at_64 = per_level[5];
  for (size_t idx = 6; idx < per_level.size(); ++idx) {
    CHECK(per_level[idx].barrier <= 1.6 * at_64.barrier);
    CHECK(per_level[idx].small <= 1.6 * at_64.small);
    CHECK(per_level[idx].large <= 1.6 * at_64.large);
  }
  for (const int size : {3, 5, 11, 100, 777, 3000}) failure_rounds(size, 30);
}
