// When waiting threads go to sleep, and for how long they take the cores for busy.

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

TEST(no_patience_sleeps_at_once) {
  Patience patience(0ms, 0);
  CHECK(!patience.lasts());
}

// Other work may end patience early, never prolong it.
TEST(patience_ends_after_its_yields) {
  Patience patience(0ms, 3);
  for (int wait = 0; wait < 3; ++wait) {
    patience.renew();
    int num_times = 0;
    while (patience.lasts()) ++num_times;
    CHECK(num_times <= 3);
    CHECK(!patience.lasts());
  }
}

TEST(patience_ends_after_its_spin_time) {
  Patience patience(1ms, 0);
  patience.lasts();
  const auto begin = Clock::now();
  while (patience.lasts() && Clock::now() - begin < 1min) {
  }
  CHECK(!patience.lasts());
}

// What interrupts one waiting thread makes all of the process sleep.
TEST(interruption_ends_patience) {
  Patience interrupted(1h, 0), other(1h, 0);
  Clock::time_point begin;
  bool other_lasts = false;
  do {  // again, if this process stood still in between
    do {
      interrupted.renew();
    } while (!interrupted.lasts());  // it was interrupted before: its busy time passes
    std::this_thread::sleep_for(5ms);
    begin = Clock::now();
    CHECK(!interrupted.lasts());
    other.renew();
    other_lasts = other.lasts();
  } while (Clock::now() - begin >= BusyTime::kShortest);
  CHECK(!other_lasts);
  do {
    other.renew();
  } while (!other.lasts());  // it ends
}
