// A few threads that wait for the next large copy.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace pipecomm {

// Owned by its caller, used by one thread at a time. Threads start at the first parallel call. In a
// process forked after that there are none, and work runs on the calling thread.
class ThreadPool {
 public:
  explicit ThreadPool(int num_threads) : num_threads_(num_threads < 1 ? 1 : num_threads) {}
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const { return num_threads_; }

  // Calls part(0) ... part(num_parts - 1), the caller taking its share, and returns when all are
  // done. `part` must not throw.
  void parallel_for(int num_parts, const std::function<void(int)>& part);

 private:
  void start();
  void work();
  void take_parts(std::unique_lock<std::mutex>& lock);

  const int num_threads_;
  std::vector<std::thread> threads_;
  int64_t owner_pid_ = 0;
  std::mutex mutex_;
  std::condition_variable work_ready_, work_done_;
  const std::function<void(int)>* part_ = nullptr;
  int num_parts_ = 0;
  int next_part_ = 0;
  int num_running_ = 0;
  bool stopping_ = false;
};

}  // namespace pipecomm
