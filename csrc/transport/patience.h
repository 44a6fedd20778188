// How long a thread that waits for a peer stays awake before it sleeps.
//
// A sleeping thread costs its peer a system call, and itself tens of microseconds until it runs. With a
// core for each rank a thread therefore spins for some time first. It never yields: other work would get
// its core for a time slice of some milliseconds, while a thread that only spins loses no more than its
// share, and one that sleeps runs soon after it is woken. Ranks that share cores yield to each other,
// which takes a microsecond, unless other work takes the slice: then all waiting threads of the process
// sleep at once for some time.
#pragma once

#include <atomic>
#include <chrono>

namespace pipecomm {

// The time for which shared cores are assumed to be busy with other work. It grows each time that they
// are found busy again.
class BusyTime {
 public:
  using Clock = std::chrono::steady_clock;

  // If the cores are busy, each attempt to yield costs a time slice; if not, each busy time costs some
  // speed.
  static constexpr Clock::duration kShortest = std::chrono::milliseconds(16);
  static constexpr Clock::duration kLongest = std::chrono::milliseconds(1024);

  void note_interruption(Clock::time_point now);
  bool includes(Clock::time_point now) const { return now < until_.load(); }

 private:
  std::atomic<Clock::time_point> until_{Clock::time_point::min()};
  std::atomic<Clock::duration> length_{Clock::duration::zero()};
};

// How long the waiting threads of a transport spin, one at a time. After spinning in vain, for a peer that
// computes or needs this very core, they spin for half as long the next time; once it was not in vain, or
// after some waits, for the whole time again.
class SpinTime {
 public:
  using Clock = std::chrono::steady_clock;

  static constexpr Clock::duration kShortest = std::chrono::microseconds(2);
  static constexpr int kSleepsPerTrial = 16;

  explicit SpinTime(Clock::duration longest) : longest_(longest), now_(longest) {}
  Clock::duration now() const { return now_; }
  void note_success() { now_ = longest_; }
  void note_sleep();

 private:
  const Clock::duration longest_;
  Clock::duration now_;
  int num_sleeps_ = 0;
};

// How long one waiting thread stays awake.
class Patience {
 public:
  using Clock = BusyTime::Clock;

  // Spins if `spin_time`, which must outlive it, is not null; then, unless the cores are busy, yields its
  // core `num_yields` times.
  Patience(SpinTime* spin_time, int num_yields) : spin_time_(spin_time), num_yields_(num_yields) {}

  void note_moved();
  void note_slept();
  // Call it if nothing has moved: stays awake for a moment and returns true, or returns false: sleep.
  bool lasts();

 private:
  SpinTime* const spin_time_;
  const int num_yields_;
  bool is_idle_ = false;
  Clock::time_point idle_since_;
  int num_yields_left_ = 0;
};

}  // namespace pipecomm
