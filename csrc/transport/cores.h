// On which cores of a host the ranks run.
#pragma once

#include <atomic>
#include <bitset>
#include <cstddef>
#include <mutex>
#include <span>
#include <string_view>

namespace pipecomm {

// The cores of a host, by their numbers.
using CoreSet = std::bitset<1024>;

CoreSet usable_cores();        // by this thread
int current_core();            // of this thread; -1: unknown
CoreSet near_cores(int core);  // of its NUMA node; all if that is unknown

// From the form in which Linux lists cores, like "0-3,8\n"; all if `text` has another one.
CoreSet parse_cores(std::string_view text);

// Moves the calling thread to one of these cores, after which it may run on all that it could run on before.
// Returns false if it may run on none of them.
bool move_to(const CoreSet& cores);

// The cores, of those that a thread on `core` may use, on which the fewest other ranks are; none if `core` is
// one of them. `others`: the cores of these ranks.
CoreSet emptier_cores(int core, const CoreSet& usable, std::span<const int> others);

// Whether each rank of this host has a core of its own. Thread-safe.
class SharedCores {
 public:
  // `num_ranks`: of the whole job, on this host. They are assumed to run on the cores of this process,
  // until `add` adds more.
  explicit SharedCores(int num_ranks);
  // A rank, which may be pinned, may run on these.
  void add(const CoreSet& cores);
  bool suffice() const { return suffice_; }

 private:
  const size_t num_ranks_;
  std::mutex mutex_;  // guards the line below
  CoreSet cores_;
  std::atomic<bool> suffice_;
};

}  // namespace pipecomm
