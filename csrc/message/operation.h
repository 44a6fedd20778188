// One call of the user: requests that succeed or fail together. A Work handle waits for it.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "message/descriptor.h"
#include "message/failure.h"
#include "plan/inline_vector.h"

namespace pipecomm {

using Clock = std::chrono::steady_clock;
using Deadline = Clock::time_point;

enum class Direction : uint8_t { send, recv };
constexpr Direction opposite(Direction direction) {
  return direction == Direction::send ? Direction::recv : Direction::send;
}

class FlightRecord;
class Operation;
struct Flight;
struct FlightMessage;
struct FlightOperation;
struct MessageCopy;
using OperationPtr = std::shared_ptr<Operation>;

// One message, one direction. Messages match in post order per (source, destination, channel).
struct Request {
  Direction direction = Direction::send;
  int peer = 0;
  Descriptor descriptor;  // of this end; the transport fills in `seq`
  // The payload of `descriptor.num_bytes`, contiguous at `data`, which may be null if it is empty;
  // or, for transports that copy on the way, gathered and scattered by `copy`.
  std::byte* data = nullptr;
  std::shared_ptr<const MessageCopy> copy;
  OperationPtr operation;  // null only for a refusal

  // A refusal takes the message's place in the order, carries no payload, and fails the request of
  // the other end with `refusal` as the reason. The refusing end's own request settles without
  // failure.
  bool refuses = false;
  std::string refusal;

  std::atomic<bool> settled{false};
  // When its payload began to move, for payloads that are sent apart from their description; 0: not
  // yet. See note_started().
  mutable std::atomic<Clock::rep> started_at{0};
  std::shared_ptr<void> transport_state;  // the transport's own, opaque to all others

  // Called on the settling thread with the failure of the request, or null, before its operation is
  // notified; returns the failure to report to the operation.
  std::function<FailurePtr(FailurePtr)> on_settled;

  void note_started() const {
    started_at.store(Clock::now().time_since_epoch().count(), std::memory_order_relaxed);
  }
};
using RequestPtr = std::shared_ptr<Request>;
using RequestList = InlineVector<RequestPtr, 8>;

RequestPtr make_request(Direction direction, int peer, const Descriptor& descriptor,
                        std::byte* data);

// "recv #3 on channel 0 from rank 1"; for a collective "the message from rank 1"
std::string message_text(Direction direction, int peer, const Descriptor& descriptor);
inline std::string request_text(const Request& request) {
  return message_text(request.direction, request.peer, request.descriptor);
}

// "12.5 s"
std::string seconds_text(Clock::duration duration);

// Fills in the fields of a failure that identify its message.
void name_message(Failure& failure, int peer, const Descriptor& descriptor);
MessageDescription description_of(const Descriptor& descriptor);

// "send #0 on channel 0 to rank 1 carries float32[4] (16 B), but rank 1 expects float32[5] (20 B)"
std::string disagreement_text(Direction direction, int peer, const Descriptor& ours,
                              const Descriptor& theirs);

// The end of the error text of a timeout.
inline constexpr char kFlightHint[] =
    "; with PIPECOMM_FLIGHT_DIR=FOLDER, `python -m pipecomm_ext doctor --flight FOLDER` shows "
    "which "
    "rank waited for which";

class Operation {
 public:
  Operation(OpCode op, Deadline deadline);
  virtual ~Operation() = default;

  // Whether streams of a device move its data, instead of requests.
  virtual bool is_on_device() const { return false; }
  // Part of a CUDA graph: it runs when the graph does, and has no end of its own.
  virtual bool is_captured() const { return false; }

  OpCode op() const { return op_; }
  Clock::time_point posted_at() const { return posted_at_; }
  Deadline deadline() const { return deadline_; }

  // --- building, before the operation is posted ---
  // Restarts its time, if it is posted later than it was made.
  void restart(Deadline deadline) {
    posted_at_ = Clock::now();
    deadline_ = deadline;
  }
  void add_request(Direction direction, int peer, const Descriptor& descriptor, std::byte* data);
  void add_requests(RequestList requests);
  // `resource` (a storage, a staging buffer) lives until the operation has settled.
  void keep(std::shared_ptr<void> resource) {
    std::lock_guard lock(mutex_);
    kept_.push_back(std::move(resource));
  }
  // Releases them early; the caller must know that nothing uses them any more.
  void let_go();
  // Sets what runs once, on the thread that settles the last request, and only if all succeeded:
  // the unpack copy of an exchange.
  void on_success(std::function<void()> epilogue) {
    std::lock_guard lock(mutex_);
    epilogue_ = std::move(epilogue);
  }
  // Records its end in `record`, which outlives it; `number` is its place in the order of posts.
  void record_in(FlightRecord& record, uint64_t number) {
    record_ = &record;
    number_ = number;
  }
  // Its place among the collectives of its communicator, from 1; 0: not a collective.
  void set_number_of_collective(uint64_t number) { number_of_collective_ = number; }
  uint64_t number_of_collective() const { return number_of_collective_; }
  // Called once after the last add_request; returns the requests to post. Settles at once if there
  // are none.
  RequestList seal();
  // Instead of seal(), for an operation whose next requests depend on how earlier ones end: it is not
  // done before release(). Each request is added before it is posted.
  void hold();
  void add(RequestPtr request);
  void release() { settle_one(nullptr); }
  // The transport has all requests so far: from now on waiters may help with them. A waiter may
  // come earlier: an operation that follows another one is built later, on another thread.
  void note_posted();

  // --- called by transports: the first call for a request counts, later ones are ignored ---
  static void settle(Request& request, FailurePtr failure);

  // Fails the operation, independent of its requests (communicator failure), unless all of them have
  // succeeded: then its epilogue writes tensors, and neither a waiter nor the caller may go on before that
  // has ended. Memory of the requests stays alive as long as the transport holds them, since a request
  // owns its operation.
  void fail(FailurePtr failure);

  // --- called by waiters ---
  bool done() const { return done_.load(std::memory_order_acquire); }
  FailurePtr failure() const;
  // Whether one of its messages failed before `time`; others may still be pending.
  bool failed_before(Clock::time_point time) const;
  // Whether the failure has been reported to a caller.
  bool failure_seen() const { return failure_seen_; }
  void note_failure_seen() { failure_seen_ = true; }
  // False if `until` passes first, or once after requests were added, so that a waiter can help.
  bool wait_until(Deadline until);

  // Whether it has no request yet, but will.
  virtual bool waits_to_start() const;
  // "1 send, 2 recv pending", for error texts.
  std::string pending_text() const;
  // A pending request to name in errors, or null.
  RequestPtr first_pending() const;
  // The requests that a waiting thread may help with (empty once done).
  RequestList requests() const;
  // Its flight record entry while it is pending; none once it has ended.
  std::optional<Flight> pending_flight() const;

 protected:
  // All with the lock: its flight record entry, and those of its messages.
  virtual FlightOperation flight_operation() const;
  virtual FlightMessage flight_message(size_t idx) const;
  virtual std::vector<FlightMessage> pending_messages() const;
  void write_down() const;

  mutable std::mutex mutex_;

 private:
  void settle_one(FailurePtr failure);
  void finish(std::unique_lock<std::mutex>& lock);

  const OpCode op_;
  Clock::time_point posted_at_;
  Deadline deadline_;
  const uint32_t call_site_;
  FlightRecord* record_ = nullptr;
  uint64_t number_ = 0;
  uint64_t number_of_collective_ = 0;
  std::condition_variable settled_;
  std::atomic<bool> done_{false};
  std::atomic<bool> failure_seen_{false};
  int num_pending_ = 0;
  FailurePtr failure_;
  Clock::time_point failed_at_;
  std::function<void()> epilogue_;
  InlineVector<std::shared_ptr<void>, 4> kept_;
  RequestList requests_;
  size_t num_posted_ = 0;          // of `requests_`
  bool is_held_ = false;           // until release()
  bool is_finishing_ = false;      // from the epilogue on
  bool has_new_requests_ = false;  // no waiter has been woken for them yet
};

}  // namespace pipecomm
