// What a communicator has done lately, to tell after a hang which rank waits for which. Operations
// that have ended are kept here, in memory that is allocated once. Those that have not are looked
// at when somebody asks (Communicator::flights), so newer ones never push out one that is stuck.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "message/operation.h"

namespace pipecomm {

enum class MessageState : uint8_t {
  posted,   // has not met its other end
  started,  // has met it, and its payload is under way; only if it travels apart from the header
  done,
};

struct FlightMessage {
  Direction direction = Direction::send;
  MessageState state = MessageState::posted;
  bool refuses = false;
  int peer = 0;
  Descriptor descriptor;
};

// One operation. A time that is not known is the epoch of the clock.
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

  // Operations that have ended, in the order in which they did.
  std::vector<Flight> ended() const;

  // Says where in the caller's program this thread is, in a numbering of the caller's own; recorded
  // with the operations that the thread makes.
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

// Both lists in one, by number. An operation that is in both has ended meanwhile.
std::vector<Flight> merge_flights(std::vector<Flight> pending, std::vector<Flight> ended);

}  // namespace pipecomm
