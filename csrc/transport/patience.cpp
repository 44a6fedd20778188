#include "transport/patience.h"

#include <sched.h>

#include <algorithm>
#include <utility>

namespace pipecomm {
namespace {

// A yield takes less, unless other work gets the core for a time slice of the scheduler, 2 ms or more.
// Ranks that share a core give it back sooner.
constexpr auto kInterruption = std::chrono::microseconds(1500);

BusyTime busy_time;  // all communicators of the process share the cores

void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

// If two threads are interrupted at once, one counts.
void BusyTime::note_interruption(Clock::time_point now) {
  if (includes(now)) return;
  const auto length = length_.load();
  const bool still_busy = length > Clock::duration::zero() && now - until_.load() < length;
  length_ = still_busy ? std::min(2 * length, kLongest) : kShortest;
  until_ = now + length_.load();
}

void SpinTime::note_sleep() {
  now_ = std::max(now_ / 2, std::min(kShortest, longest_));
  if (++num_sleeps_ % kSleepsPerTrial == 0) now_ = longest_;
}

void Patience::note_moved() {
  if (std::exchange(is_idle_, false) && spin_time_) spin_time_->note_success();
}

void Patience::note_slept() {
  is_idle_ = false;
  if (spin_time_) spin_time_->note_sleep();
}

bool Patience::lasts() {
  const auto now = Clock::now();
  if (!std::exchange(is_idle_, true)) {
    idle_since_ = now;
    num_yields_left_ = num_yields_;
  }
  if (spin_time_ && now - idle_since_ < spin_time_->now()) {
    pause_briefly();
    return true;
  }
  if (num_yields_left_ == 0 || busy_time.includes(now)) return false;
  --num_yields_left_;
  sched_yield();
  if (const auto then = Clock::now(); then - now >= kInterruption)
    busy_time.note_interruption(then);
  return true;
}

}  // namespace pipecomm
