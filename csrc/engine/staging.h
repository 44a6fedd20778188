// Reusable buffers for packed messages: nothing is allocated once sizes repeat.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace pipecomm {

class StagingPool {
 public:
  // At least `num_bytes`, aligned to a page; goes back to the pool when the last reference is
  // dropped, on any thread.
  std::shared_ptr<std::byte> acquire(int64_t num_bytes);
  int64_t num_allocations() const { return state_->num_allocations; }

 private:
  struct Buffer {
    std::byte* data;
    int64_t num_bytes;
  };
  struct State {  // outlives the pool while buffers are out
    std::mutex mutex;
    std::vector<Buffer> free;
    std::atomic<int64_t> num_allocations{0};
    ~State();
  };
  std::shared_ptr<State> state_ = std::make_shared<State>();
};

}  // namespace pipecomm
