// Whether this process is a fork of the one that made an object, whose threads and connections do not
// exist here. Costs no system call.
#pragma once

#include <pthread.h>

#include <atomic>

namespace pipecomm {

class ForkMark {
 public:
  ForkMark() : num_forks_(forks().load(std::memory_order_relaxed)) {}
  bool is_in_fork() const { return forks().load(std::memory_order_relaxed) != num_forks_; }

 private:
  // The number of forks that led to this process since the first mark was made.
  static std::atomic<int>& forks() {
    static std::atomic<int> num_forks{0};
    [[maybe_unused]] static const int registered =
        pthread_atfork(nullptr, nullptr, [] { num_forks.fetch_add(1, std::memory_order_relaxed); });
    return num_forks;
  }

  int num_forks_;
};

}  // namespace pipecomm
