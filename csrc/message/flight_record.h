// The latest operations of a communicator, to find out after a hang which rank waits for which.
// Ended operations are kept here, in memory that is allocated once. Pending ones are read on
// request (Dispatch::flights), so newer operations never displace one that is stuck.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <mutex>
#include <vector>

#include "message/operation.h"

namespace pipecomm {

enum class MessageState : uint8_t {
  posted,   // not matched with its other end yet
  started,  // matched, and its payload is being moved; only if it is sent apart from the header
  done,
};

struct FlightMessage {
  Direction direction = Direction::send;
  MessageState state = MessageState::posted;
  bool refuses = false;
  int peer = 0;
  Descriptor descriptor;
};

// One operation. An unknown time is the epoch of the clock.
struct FlightOperation {
  uint64_t number = 0;  // counts the operations of its communicator
  OpCode op = OpCode::p2p;
  bool on_device = false;
  bool is_captured = false;  // part of a CUDA graph, whose replays are not recorded
  bool ended = false;
  uint32_t call_site = 0;
  Clock::time_point posted_at;
  Clock::time_point started_at;  // its first message was matched
  Clock::time_point ended_at;
  FailurePtr failure;
  size_t num_messages = 0;
};

struct Flight {
  FlightOperation operation;
  std::vector<FlightMessage> messages;  // those that are kept
};

class FlightRecord {
 public:
  static constexpr size_t kNumOperations = 1024;
  static constexpr size_t kNumMessages = 2048;
  static constexpr size_t kMaxMessagesPerOperation = 64;

  // `on_failure` is called for every operation that fails, and by note_failure(), on any thread,
  // possibly with locks of the engine held.
  explicit FlightRecord(std::function<void()> on_failure = nullptr);

  // Adds the next operation that has ended; `message(idx)` describes its messages.
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

  // The place in the caller's program where this thread is, as a number that the caller assigns;
  // recorded with the operations that the thread makes.
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

// Merges both lists by number. An operation that is in both has ended meanwhile.
std::vector<Flight> merge_flights(std::vector<Flight> pending, std::vector<Flight> ended);

}  // namespace pipecomm
