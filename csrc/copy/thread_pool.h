// A few threads that wait for the next large copy.
#pragma once

#include <functional>
#include <memory>

namespace pipecomm {

// Owned by its caller and used by one thread at a time. Threads start at the first parallel call.
// In a process forked after that they do not exist, and work runs on the calling thread.
class ThreadPool {
 public:
  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const { return num_threads_; }

  // Calls part(0) ... part(num_parts - 1), the caller taking its share, and returns when all are
  // done. `part` must not throw.
  void parallel_for(int num_parts, const std::function<void(int)>& part);

 private:
  class Workers;

  const int num_threads_;
  std::unique_ptr<Workers> workers_;
};

}  // namespace pipecomm
