// When waiting threads go to sleep, and how long they assume that the cores are busy.

#include <sched.h>

#include "check.h"
#include "transport/patience.h"

using Clock = Patience::Clock;

const Clock::time_point kStart = Clock::now();

TEST(busy_time_grows_while_interruptions_go_on) {
  BusyTime busy;
  CHECK(!busy.includes(kStart));
  auto now = kStart;
  auto length = BusyTime::kShortest;
  for (int idx = 0; idx < 10; ++idx) {
    busy.note_interruption(now);
    CHECK(busy.includes(now));
    CHECK(busy.includes(now + length - 1ns));
    CHECK(!busy.includes(now + length));
    now += 2 * length - 1ns;  // the cores were thought to be free for not quite as long
    length = std::min(2 * length, BusyTime::kLongest);
  }
  CHECK(length == BusyTime::kLongest);
}

TEST(busy_time_begins_anew_after_quiet_time) {
  BusyTime busy;
  busy.note_interruption(kStart);
  const auto second = kStart + BusyTime::kShortest;
  busy.note_interruption(second);
  const auto third = second + 2 * BusyTime::kShortest + 2 * BusyTime::kShortest;
  busy.note_interruption(third);
  CHECK(busy.includes(third + BusyTime::kShortest - 1ns));
  CHECK(!busy.includes(third + BusyTime::kShortest));
}

TEST(interruptions_within_a_busy_time_do_not_prolong_it) {
  BusyTime busy;
  busy.note_interruption(kStart);
  busy.note_interruption(kStart + 1ms);
  CHECK(!busy.includes(kStart + BusyTime::kShortest));
}

TEST(spin_time_shrinks_while_it_is_in_vain) {
  SpinTime spin(50us);
  auto expected = spin.now();
  CHECK(expected == 50us);
  for (int sleep = 1; sleep < SpinTime::kSleepsPerTrial; ++sleep) {
    spin.note_sleep();
    expected = std::max<Clock::duration>(expected / 2, SpinTime::kShortest);
    CHECK(spin.now() == expected);
  }
  CHECK(spin.now() == SpinTime::kShortest);
  spin.note_sleep();
  CHECK(spin.now() == 50us);  // a trial
  spin.note_sleep();
  CHECK(spin.now() == 25us);
  spin.note_success();
  CHECK(spin.now() == 50us);
}

TEST(no_patience_sleeps_at_once) {
  Patience patience(nullptr, 0);
  CHECK(!patience.lasts());
}

// Other work may end patience early, never prolong it.
TEST(patience_ends_after_its_yields) {
  Patience patience(nullptr, 3);
  for (int wait = 0; wait < 3; ++wait) {
    patience.note_moved();
    int num_times = 0;
    while (patience.lasts()) ++num_times;
    CHECK(num_times <= 3);
    CHECK(!patience.lasts());
  }
}

TEST(patience_ends_after_its_spin_time) {
  SpinTime spin(1ms);
  Patience patience(&spin, 0);
  CHECK(patience.lasts());
  const auto begin = Clock::now();
  while (patience.lasts() && Clock::now() - begin < 1min) {
  }
  CHECK(!patience.lasts());
  patience.note_slept();
  CHECK(spin.now() == 500us);
  patience.lasts();
  patience.note_moved();
  CHECK(spin.now() == 1ms);
  patience.note_slept();
  patience.note_moved();  // at once, without any patience
  CHECK(spin.now() == 500us);
}

// Other work that takes the core at a yield makes the process sleep, unless each thread has a core.
TEST(yields_to_other_work_end_patience) {
  const int core = sched_getcpu();
  const auto pin = [core] {
    cpu_set_t cores;
    CPU_ZERO(&cores);
    CPU_SET(core, &cores);
    sched_setaffinity(0, sizeof cores, &cores);
  };
  std::atomic<bool> is_over{false};
  std::thread stranger([&] {
    pin();
    while (!is_over) {
    }
  });
  std::thread waiter([&] {
    pin();
    constexpr int kMany = 1 << 30;
    SpinTime spin(1h);
    Patience yields(nullptr, kMany), other(nullptr, kMany), spins(&spin, 0);
    // Kernels with short time slices interrupt nobody for long enough.
    const auto end = Clock::now() + 10s;
    std::optional<Clock::time_point> yielded_at;  // the busy time begins after it
    while (Clock::now() < end) {
      const auto begin = Clock::now();
      yields.note_moved();
      if (yields.lasts()) {
        yielded_at = begin;
        continue;
      }
      if (!yielded_at) continue;  // busy since earlier
      const bool other_lasts = other.lasts();
      if (Clock::now() - *yielded_at < BusyTime::kShortest) {
        CHECK(!other_lasts);
        break;
      }
      yielded_at.reset();  // this process stood still in between
    }
    CHECK(spins.lasts());
    is_over = true;
  });
  waiter.join();
  stranger.join();
}
