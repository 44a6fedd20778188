#include "transport/patience.h"

#include <sched.h>

#include <algorithm>

namespace pipecomm {
namespace {

// A thread that is awake looks at the clock far more often, unless other work has its core for a
// time slice of the scheduler, 2 ms or more. Ranks that share a core hand it over sooner.
constexpr auto kInterruption = std::chrono::microseconds(1500);
// A spinning thread yields each time after so many looks: its peer may wait for the same core.
constexpr int kLooksPerYield = 8;

BusyTime busy_time;  // of the cores, which all communicators of the process share

void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

int num_usable_cores() {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  return sched_getaffinity(0, sizeof cores, &cores) == 0 ? CPU_COUNT(&cores) : 1;
}

// Of two threads that are interrupted at once, one counts.
void BusyTime::note_interruption(Clock::time_point now) {
  if (includes(now)) return;
  const auto length = length_.load();
  const bool still_busy = length > Clock::duration::zero() && now - until_.load() < length;
  length_ = still_busy ? std::min(2 * length, kLongest) : kShortest;
  until_ = now + length_.load();
}

bool Patience::lasts() {
  const auto now = look_at_clock();
  if (busy_time.includes(now)) return false;
  if (now - idle_since_ < spin_time_) {
    if (++num_looks_ % kLooksPerYield == 0)
      yield();
    else
      pause_briefly();
    return true;
  }
  if (num_yields_left_ == 0) return false;
  --num_yields_left_;
  yield();
  return true;
}

void Patience::yield() {
  sched_yield();
  look_at_clock();
}

Patience::Clock::time_point Patience::look_at_clock() {
  const auto now = Clock::now();
  if (!is_idle_) {
    is_idle_ = true;
    idle_since_ = now;
    num_looks_ = 0;
    num_yields_left_ = num_yields_;
  } else if (now - looked_at_ >= kInterruption) {
    busy_time.note_interruption(now);
  }
  looked_at_ = now;
  return now;
}

}  // namespace pipecomm
