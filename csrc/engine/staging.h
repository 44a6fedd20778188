// Reusable buffers for packed messages: nothing is allocated once sizes repeat.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace pipecomm {

class StagingPool {
 public:
  using Allocate = std::function<std::shared_ptr<std::byte>(int64_t num_bytes)>;
  // By default, ordinary memory aligned to a page.
  StagingPool();
  explicit StagingPool(Allocate allocate) : allocate_(std::move(allocate)) {}

  // At least `num_bytes`; goes back to the pool when the last reference is dropped, on any thread.
  std::shared_ptr<std::byte> acquire(int64_t num_bytes);
  int64_t num_allocations() const { return state_->num_allocations; }

 private:
  struct Buffer {
    std::shared_ptr<std::byte> data;
    int64_t num_bytes = 0;
  };
  struct State {  // outlives the pool while buffers are out
    std::mutex mutex;
    std::vector<Buffer> free;
    std::atomic<int64_t> num_allocations{0};
  };
  Allocate allocate_;
  std::shared_ptr<State> state_ = std::make_shared<State>();
};

}  // namespace pipecomm
