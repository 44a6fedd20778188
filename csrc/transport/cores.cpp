#include "transport/cores.h"

#include <fcntl.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdio>

namespace pipecomm {
namespace {

constexpr size_t kNumKnown = std::min<size_t>(CoreSet().size(), CPU_SETSIZE);
constexpr int kMaxNodes = 64;

}  // namespace

CoreSet usable_cores() {
  CoreSet cores;
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) != 0) CPU_SET(0, &set);
  for (size_t core = 0; core < kNumKnown; ++core) cores[core] = CPU_ISSET(core, &set);
  return cores;
}

int current_core() { return sched_getcpu(); }

CoreSet parse_cores(std::string_view text) {
  CoreSet cores;
  const char* at = text.data();
  const char* const end = at + text.size();
  const auto number = [&](size_t& value) {
    const auto [next, error] = std::from_chars(at, end, value);
    at = next;
    return error == std::errc();
  };
  const auto skips = [&](char wanted) {
    const bool is_there = at != end && *at == wanted;
    at += is_there;
    return is_there;
  };
  do {
    size_t first = 0;
    if (!number(first)) return ~CoreSet();
    size_t last = first;
    if (skips('-') && !number(last)) return ~CoreSet();
    for (size_t core = first; core <= std::min(last, cores.size() - 1); ++core) cores.set(core);
  } while (skips(','));
  return cores;
}

CoreSet near_cores(int core) {
  for (int node = 0; node < kMaxNodes; ++node) {
    std::array<char, 64> path;
    std::snprintf(path.data(), path.size(), "/sys/devices/system/node/node%d/cpulist", node);
    const int fd = open(path.data(), O_RDONLY | O_CLOEXEC);
    if (fd < 0) continue;
    std::array<char, 4096> text;
    const ssize_t num_read = read(fd, text.data(), text.size());
    close(fd);
    if (num_read < 0) continue;
    const CoreSet cores = parse_cores({text.data(), static_cast<size_t>(num_read)});
    if (cores[static_cast<size_t>(core)]) return cores;
  }
  return ~CoreSet();
}

bool move_to(const CoreSet& cores) {
  cpu_set_t usable, chosen;
  if (sched_getaffinity(0, sizeof usable, &usable) != 0) return false;
  CPU_ZERO(&chosen);
  for (size_t core = 0; core < kNumKnown; ++core)
    if (cores[core] && CPU_ISSET(core, &usable)) CPU_SET(core, &chosen);
  if (CPU_COUNT(&chosen) == 0 || sched_setaffinity(0, sizeof chosen, &chosen) != 0) return false;
  sched_setaffinity(0, sizeof usable, &usable);
  return true;
}

CoreSet emptier_cores(int core, const CoreSet& usable, std::span<const int> others) {
  std::array<size_t, CoreSet().size()> num_ranks{};
  for (const int each : others) ++num_ranks[static_cast<size_t>(each)];
  size_t fewest = num_ranks[static_cast<size_t>(core)];
  CoreSet emptier;
  for (size_t each = 0; each < usable.size(); ++each) {
    if (!usable[each] || num_ranks[each] > fewest) continue;
    if (num_ranks[each] < fewest) emptier.reset();
    fewest = num_ranks[each];
    emptier.set(each);
  }
  return fewest < num_ranks[static_cast<size_t>(core)] ? emptier : CoreSet();
}

SharedCores::SharedCores(int num_ranks)
    : num_ranks_(static_cast<size_t>(num_ranks)),
      cores_(usable_cores()),
      suffice_(cores_.count() >= num_ranks_) {}

void SharedCores::add(const CoreSet& cores) {
  std::lock_guard lock(mutex_);
  cores_ |= cores;
  suffice_ = cores_.count() >= num_ranks_;
}

}  // namespace pipecomm
