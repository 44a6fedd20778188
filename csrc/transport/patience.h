// How long a thread that waits for a peer stays awake before it sleeps.
//
// A sleeper costs its peer a system call, and itself tens of microseconds until it runs. On cores
// that other work wants as well it is the other way round: a thread that yields its core gives away
// a whole time slice, some milliseconds, and one that spins uses up its share, while one that has
// slept runs soon after it is woken. So a thread that loses its core while it is awake takes note,
// and for some time all waiting threads of the process sleep at once.
#pragma once

#include <atomic>
#include <chrono>

namespace pipecomm {

int num_usable_cores();  // by this process

// The time in which the cores are taken for busy. It is longer each time that they prove to be busy
// still.
class BusyTime {
 public:
  using Clock = std::chrono::steady_clock;

  // Each attempt to stay awake costs a time slice if the cores are busy, and each busy time some
  // speed if they are not.
  static constexpr Clock::duration kShortest = std::chrono::milliseconds(16);
  static constexpr Clock::duration kLongest = std::chrono::milliseconds(1024);

  void note_interruption(Clock::time_point now);
  bool includes(Clock::time_point now) const { return now < until_.load(); }

 private:
  std::atomic<Clock::time_point> until_{Clock::time_point::min()};
  std::atomic<Clock::duration> length_{Clock::duration::zero()};
};

// Of one thread while it waits.
class Patience {
 public:
  using Clock = BusyTime::Clock;

  // Stays awake for `spin_time`, and until it has yielded its core `num_yields` times after that.
  Patience(Clock::duration spin_time, int num_yields)
      : spin_time_(spin_time), num_yields_(num_yields) {}

  // Something has moved, or the thread has slept.
  void renew() { is_idle_ = false; }
  // If nothing has moved: stays awake for a moment and returns true, or returns false: sleep.
  bool lasts();

 private:
  Clock::time_point look_at_clock();
  void yield();

  const Clock::duration spin_time_;
  const int num_yields_;
  bool is_idle_ = false;
  Clock::time_point idle_since_, looked_at_;  // since renew(), as all that follows
  int num_looks_ = 0;
  int num_yields_left_ = 0;
};

}  // namespace pipecomm
