// Sleeping on a bell and waking its sleepers; the rules are in layout.h.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <climits>
#include <ctime>

#include "transport/shm/layout.h"

namespace pipecomm::shm {

// The threads of a rank that may sleep on its bell.
inline constexpr uint32_t kNobody = 0;
inline constexpr uint32_t kWaiter = 1;    // a thread of the user, in wait()
inline constexpr uint32_t kProgress = 2;  // the thread that works when no user waits
inline constexpr uint32_t kEverybody = kWaiter | kProgress;
// In `sleepers`: the progress thread sleeps, and small messages need not wake it.
inline constexpr uint32_t kDeferred = 4;

inline void wake(Bell& bell, uint32_t who) {
  bell.count.fetch_add(1);
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&bell.count), FUTEX_WAKE_BITSET, INT_MAX, nullptr,
          nullptr, who);
}

// Call this after a sequentially consistent store of anything that a sleeper may wait for.
inline void wake_sleepers(Bell& bell) {
  const uint32_t who = bell.sleepers.load();
  if (who != kNobody) wake(bell, who == kDeferred ? kProgress : who);
}
// The same, after a store that a rank which defers its progress may see later.
inline void wake_unless_deferred(Bell& bell) {
  if (const uint32_t who = bell.sleepers.load(); (who & kEverybody) != 0) wake(bell, who);
}
// Called by a rank that waits for the owner of the bell.
inline void wake_deferred(Bell& bell) {
  if (bell.sleepers.load() == kDeferred) wake(bell, kProgress);
}

// Sleeps until a thread wakes `who`, unless that has happened since the bell's count was `count`.
// Returns early for signals and after `limit`.
inline void sleep(Bell& bell, uint32_t count, uint32_t who, std::chrono::nanoseconds limit) {
  timespec until{};  // FUTEX_WAIT_BITSET takes absolute time
  clock_gettime(CLOCK_MONOTONIC, &until);
  const int64_t nanoseconds = until.tv_nsec + limit.count();
  until.tv_sec += nanoseconds / 1'000'000'000;
  until.tv_nsec = nanoseconds % 1'000'000'000;
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&bell.count), FUTEX_WAIT_BITSET, count, &until,
          nullptr, who);
}

}  // namespace pipecomm::shm
