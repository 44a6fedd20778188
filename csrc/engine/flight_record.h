// What a communicator has done lately, for the question that matters after a hang: who waits for
// whom. Operations that have ended lie here, in memory that is allocated once; those that have not
// are asked themselves (Communicator::flights), so a stuck one is never lost behind those that pass
// it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "engine/operation.h"

namespace pipecomm {

enum class MessageState : uint8_t {
  posted,   // has not met its other end
  started,  // has met it, the payload is under way; only messages with a payload of their own
  done,
};

struct FlightMessage {
  Direction direction = Direction::send;
  MessageState state = MessageState::posted;
  bool refuses = false;
  int peer = 0;
  Descriptor descriptor;
};

// One operation. Times that are not known are the epoch of the clock.
struct FlightOperation {
  uint64_t number = 0;  // counts the operations of its communicator
  OpCode op = OpCode::p2p;
  bool on_device = false;
  bool is_captured = false;  // part of a CUDA graph, whose replays are not recorded
  bool ended = false;
  uint32_t call_site = 0;
  Clock::time_point posted_at;
  Clock::time_point started_at;  // its first message met the other end
  Clock::time_point ended_at;
  FailurePtr failure;
  size_t num_messages = 0;
};

struct Flight {
  FlightOperation operation;
  std::vector<FlightMessage> messages;  // as far as they are kept
};

class FlightRecord {
 public:
  static constexpr size_t kNumOperations = 1024;
  static constexpr size_t kNumMessages = 2048;
  static constexpr size_t kMaxMessagesPerOperation = 64;

  // `on_failure` is called for every operation that fails, and by note_failure(), on any thread and
  // perhaps under locks of the engine.
  explicit FlightRecord(std::function<void()> on_failure = nullptr);

  // The next operation that has ended; `message(idx)` describes its messages.
  template <class Message>
  void add(const FlightOperation& operation, Message&& message) {
    {
      std::lock_guard lock(mutex_);
      Slot& slot = operations_[num_operations_++ % kNumOperations];
      slot.operation = operation;
      slot.first_message = num_messages_;
      slot.num_kept = std::min(operation.num_messages, kMaxMessagesPerOperation);
      for (size_t idx = 0; idx < slot.num_kept; ++idx)
        messages_[num_messages_++ % kNumMessages] = message(idx);
    }
    if (operation.failure) note_failure();
  }
  void note_failure() const {
    if (on_failure_) on_failure_();
  }

  // In the order in which they ended.
  std::vector<Flight> ended() const;

  // A number of the caller's own that says where in its program this thread is; goes into the
  // operations that the thread makes.
  static inline thread_local uint32_t call_site = 0;

 private:
  struct Slot {
    FlightOperation operation;
    uint64_t first_message = 0;
    size_t num_kept = 0;
  };

  const std::function<void()> on_failure_;
  mutable std::mutex mutex_;
  std::vector<Slot> operations_;
  std::vector<FlightMessage> messages_;
  uint64_t num_operations_ = 0;
  uint64_t num_messages_ = 0;
};

// `ended` and the operations that are pending, by number; what ended meanwhile counts as ended.
std::vector<Flight> merge_flights(std::vector<Flight> pending, std::vector<Flight> ended);

}  // namespace pipecomm
