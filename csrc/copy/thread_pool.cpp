#include "copy/thread_pool.h"

#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "copy/fork_mark.h"

namespace pipecomm {

class ThreadPool::Workers {
 public:
  explicit Workers(int num_threads) {
    try {
      for (int i = 0; i < num_threads; ++i) threads_.emplace_back([this] { work(); });
    } catch (const std::system_error&) {
      // The limit on threads is reached: the existing ones, if any, and the caller do the work.
    }
  }

  ~Workers() {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    work_ready_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  bool exist_in_this_process() const { return !fork_mark_.is_in_fork(); }

  void run(int num_parts, const std::function<void(int)>& part) {
    std::unique_lock lock(mutex_);
    part_ = &part;
    num_parts_ = num_parts;
    next_part_ = 0;
    work_ready_.notify_all();
    take_parts(lock);
    work_done_.wait(lock, [this] { return num_running_ == 0; });
  }

 private:
  void take_parts(std::unique_lock<std::mutex>& lock) {
    while (next_part_ < num_parts_) {
      const int i = next_part_++;
      ++num_running_;
      lock.unlock();
      (*part_)(i);
      lock.lock();
      --num_running_;
    }
  }

  void work() {
    std::unique_lock lock(mutex_);
    while (true) {
      work_ready_.wait(lock, [this] { return stopping_ || next_part_ < num_parts_; });
      if (stopping_) return;
      take_parts(lock);
      if (num_running_ == 0) work_done_.notify_one();
    }
  }

  const ForkMark fork_mark_;
  std::mutex mutex_;
  std::condition_variable work_ready_, work_done_;
  const std::function<void(int)>* part_ = nullptr;
  int num_parts_ = 0;
  int next_part_ = 0;
  int num_running_ = 0;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

ThreadPool::ThreadPool(int num_threads) : num_threads_(num_threads < 1 ? 1 : num_threads) {}

ThreadPool::~ThreadPool() {
  // A forked child has the handles but not the threads: they cannot be joined, and destroying a
  // condition variable would wait for its lost waiters. The child leaves them alone.
  if (workers_ && !workers_->exist_in_this_process()) workers_.release();
}

void ThreadPool::parallel_for(int num_parts, const std::function<void(int)>& part) {
  const bool is_parallel = num_threads_ > 1 && num_parts > 1;
  if (is_parallel && !workers_) workers_ = std::make_unique<Workers>(num_threads_ - 1);
  if (is_parallel && workers_->exist_in_this_process()) {
    workers_->run(num_parts, part);
  } else {
    for (int i = 0; i < num_parts; ++i) part(i);
  }
}

}  // namespace pipecomm
