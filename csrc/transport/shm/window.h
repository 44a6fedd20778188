// Results that peers write directly: the window of a segment, on both ends.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "message/message_copy.h"
#include "transport/shm/segment.h"

namespace pipecomm::shm {

// Allocates from the window of the rank's own segment, lowest address first, so that pages are
// reused: the first touch of a page costs more than copying it. A forked child gets copies of the results
// in use, as of all other memory of the process.
class WindowPool {
 public:
  explicit WindowPool(SegmentPtr segment);

  // Null if nothing that large is free, or once the pool has ended. Aligned to pages. Any thread may
  // drop the last reference.
  std::shared_ptr<std::byte> allocate(int64_t num_bytes);

  // Where the payload of `recv` lies in the window, if all of it does, in few enough parts.
  std::optional<Grant> find(const Request& recv) const;

  // What peers write from now on for these receives, which they were granted, does not reach the tensors.
  // Only the first call has an effect.
  void end(std::span<const RequestPtr> granted);

 private:
  struct State {  // outlives the pool while results are in use
    explicit State(SegmentPtr segment);
    ~State();
    void release(int64_t offset, int64_t num_bytes);
    void before_fork();  // takes the lock, which both of these release
    void after_fork_in_parent();
    void after_fork_in_child();

    struct Copy {
      void* memory;
      int64_t offset, num_bytes;
    };

    const SegmentPtr segment;
    std::mutex mutex;
    std::map<int64_t, int64_t> free;  // offset -> bytes, merged
    int64_t idle_bytes = 0;           // free, and perhaps still backed by pages
    bool is_over = false;  // perhaps because the pool belongs to the parent of this process
    std::vector<std::pair<int64_t, int64_t>> made_private;  // begins and ends, ascending
    std::vector<Copy> copies;  // of what is in use, while the process forks
  };
  struct AllStates;

  std::byte* const base_;
  const int64_t num_bytes_;
  std::shared_ptr<State> state_;
};

// Writes a message into the window of its receiver, which has granted it.
class WindowWriter {
 public:
  // Throws std::runtime_error unless the grant lies in the window and holds no more than the
  // message.
  WindowWriter(const Grant& grant, Segment& receiver, int64_t num_message_bytes);
  // Thread-safe for parts that do not overlap.
  void write(const Request& send, int64_t begin, int64_t end) const;

 private:
  LoweredExchange parts_;
  LoweredMessage message_;
  void* window_;
};

}  // namespace pipecomm::shm
