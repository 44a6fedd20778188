// Counts what the extension asks of the system on one thread: memory, and system calls. Loaded with
// ctypes; see counting_calls.py.
#include <sched.h>
#include <sys/syscall.h>

#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

#include "imports.h"

namespace {

// Of the thread that counts. A thread that waits looks for its message again and again, yields its core
// and sleeps; how often is a matter of time.
struct Counts {
  bool is_on = false;
  long num_allocations = 0;
  long num_waits = 0;
  long num_system_calls = 0;
};
thread_local Counts counts;

void* counting_new(size_t size) {
  counts.num_allocations += counts.is_on;
  return ::operator new(size);
}
void* counting_aligned_new(size_t size, std::align_val_t alignment) {
  counts.num_allocations += counts.is_on;
  return ::operator new(size, alignment);
}
void* counting_malloc(size_t size) {
  counts.num_allocations += counts.is_on;
  return malloc(size);
}
void* counting_aligned_alloc(size_t alignment, size_t size) {
  counts.num_allocations += counts.is_on;
  return aligned_alloc(alignment, size);
}
int counting_sched_yield() {
  counts.num_waits += counts.is_on;
  return sched_yield();
}
pid_t counting_getpid() {
  counts.num_system_calls += counts.is_on;
  return getpid();
}
long counting_syscall(long number, long a, long b, long c, long d, long e, long f) {
  (number == SYS_futex ? counts.num_waits : counts.num_system_calls) += counts.is_on;
  return syscall(number, a, b, c, d, e, f);
}

template <class Function>
std::pair<const char*, void*> counting(const char* name, Function* function) {
  return {name, reinterpret_cast<void*>(function)};
}

const std::pair<const char*, void*> kCounting[] = {
    counting("_Znwm", counting_new),
    counting("_ZnwmSt11align_val_t", counting_aligned_new),
    counting("malloc", counting_malloc),
    counting("aligned_alloc", counting_aligned_alloc),
    counting("sched_yield", counting_sched_yield),
    counting("getpid", counting_getpid),
    counting("syscall", counting_syscall),
};

}  // namespace

extern "C" {

// How many imports of the loaded object are counted from now on.
int watch(const char* path) {
  int num_watched = 0;
  for_each_import(path, [&](const char* name, void** place) {
    for (const auto& [counted, function] : kCounting) {
      if (std::strcmp(name, counted) != 0) continue;
      replace_import(place, function);
      ++num_watched;
    }
  });
  return num_watched;
}
// On this thread.
void begin() { counts = {.is_on = true}; }
void end() { counts.is_on = false; }
long allocations() { return counts.num_allocations; }
long waits() { return counts.num_waits; }
long system_calls() { return counts.num_system_calls; }

}  // extern "C"
