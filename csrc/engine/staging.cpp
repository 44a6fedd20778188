#include "engine/staging.h"

#include <algorithm>
#include <cstdlib>
#include <new>

#include "message/recycled.h"

namespace pipecomm {
namespace {

constexpr int64_t kPageBytes = 4096;
// More than enough for the exchanges in flight on one communicator; further buffers are freed.
constexpr size_t kMaxFreeBuffers = 16;

std::shared_ptr<std::byte> allocate_pages(int64_t num_bytes) {
  auto* const data =
      static_cast<std::byte*>(std::aligned_alloc(kPageBytes, static_cast<size_t>(num_bytes)));
  if (data == nullptr) throw std::bad_alloc();
  return {data, [](std::byte* memory) { std::free(memory); }};
}

}  // namespace

StagingPool::StagingPool() : StagingPool(allocate_pages) {}

std::shared_ptr<std::byte> StagingPool::acquire(int64_t num_bytes) {
  if (num_bytes == 0) return nullptr;
  Buffer buffer;
  {
    std::lock_guard lock(state_->mutex);
    // Smallest that fits, but never one that is much too large.
    auto best = state_->free.end();
    for (auto it = state_->free.begin(); it != state_->free.end(); ++it) {
      if (it->num_bytes < num_bytes || it->num_bytes > 2 * num_bytes + kPageBytes) continue;
      if (best == state_->free.end() || it->num_bytes < best->num_bytes) best = it;
    }
    if (best != state_->free.end()) {
      buffer = std::move(*best);
      state_->free.erase(best);
    }
  }
  if (!buffer.data) {
    buffer.num_bytes = (num_bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
    buffer.data = allocate_(buffer.num_bytes);
    ++state_->num_allocations;
  }
  std::byte* const data = buffer.data.get();
  return {data,
          [state = state_, buffer = std::move(buffer)](std::byte*) {
            Buffer dropped;  // destroyed without the lock
            std::lock_guard lock(state->mutex);
            if (state->free.size() == kMaxFreeBuffers) {
              dropped = std::move(state->free.front());
              state->free.erase(state->free.begin());
            }
            state->free.push_back(buffer);
          },
          Recycled<std::byte>()};
}

}  // namespace pipecomm
