// Orders, numbers and posts the operations of a communicator over its HostTransport, compares
// collectives with other ranks, watches deadlines, and turns an error on any rank into one error on
// all of them. An Execution makes the operations and moves their data.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "copy/device_runtime.h"
#include "copy/fork_mark.h"
#include "engine/collective_line.h"
#include "engine/communicator_state.h"
#include "engine/sequencer.h"
#include "message/connection_events.h"
#include "message/failure.h"
#include "message/flight_record.h"
#include "message/operation.h"
#include "message/queue.h"
#include "transport/transport.h"

namespace pipecomm {

// Called now and then by a thread that waits, unless null; may throw (pending signals).
using Interrupted = std::function<void()>;

// The members of a collective, and the channel that orders its messages.
struct Scope {
  std::vector<int> members;          // increasing, this rank among them; empty: all ranks
  int channel = kCollectiveChannel;  // or one of the user's
  // The ranks of the NCCL communicator that the exchange runs on: increasing, with the members
  // among them, and the same on all of them; empty: the members.
  std::vector<int> within = {};
  // The number of the collective whose gradients this one moves, which the ranks compare; or 0.
  uint64_t gradient_of = 0;
};

struct CommunicatorOptions {
  int rank = 0;
  int size = 1;
  int num_channels = 2;
  std::optional<std::chrono::nanoseconds> timeout;  // none: wait forever
  int num_threads = 1;                              // for packing
  bool checks = true;  // compare dtypes, shapes and arguments, not only sizes
  // Called when an operation or the communicator has failed, see FlightRecord.
  std::function<void()> on_failure = nullptr;
  // Up to this many members of a collective compare it directly, without a tree.
  int direct_limit = kDirectLimit;
  // Device of the tensors; calls then wait for the work on the caller's stream. Null: host memory.
  std::shared_ptr<DeviceRuntime> device = nullptr;
};

// What a Dispatch asks of the execution.
class DispatchEvents {
 public:
  virtual ~DispatchEvents() = default;

  // Lends a waiting thread to the operation, see HostTransport.
  virtual bool assist(Operation& operation) = 0;
  virtual bool is_late(const Operation& operation) const {
    return Clock::now() >= operation.deadline();
  }
  // Looks for trouble on the watchdog's thread, as often as HostTransport::tick().
  virtual bool tick() { return false; }
  // Fails the communicator because of an operation on a device that is late.
  virtual void expire(const Operation& /*operation*/) {}
  // The execution of a peer has sent this, see HostTransport::send_control.
  virtual void on_control(int /*peer*/, std::span<const std::byte> /*message*/) {}

  // When the communicator closes: waits for the operations in flight, and throws their failure.
  virtual void finish(const Interrupted& /*interrupted*/) {}
  // After this, no data move. `in_order`: after finish(), if the communicator has not failed.
  virtual void end(bool /*in_order*/) {}
};

class Dispatch : private TransportEvents {
 public:
  using MakeTransport = std::function<std::unique_ptr<HostTransport>(TransportEvents&)>;

  Dispatch(const Dispatch&) = delete;
  Dispatch& operator=(const Dispatch&) = delete;

  int rank() const { return options_.rank; }
  int size() const { return options_.size; }
  const CommunicatorOptions& options() const { return options_; }
  // All other ranks, increasing.
  std::span<const int> others() const { return others_; }
  // The other ranks that take part. Throws std::invalid_argument if `scope` is not possible.
  std::vector<int> peers_in(const Scope& scope) const;
  // Whether a collective of `num_members` has too many to be compared directly.
  bool are_many(size_t num_members) const {
    return num_members > static_cast<size_t>(options_.direct_limit);
  }
  bool runs_in_line(int channel) const { return line_ && channel == kCollectiveChannel; }
  HostTransport& transport() { return *transport_; }
  // See HostTransport::describe_peer.
  std::string describe_peer(int peer) const { return transport_->describe_peer(peer); }
  std::shared_ptr<ConnectionEvents> connection_events() override { return connection_events_; }

  // Operations.
  OperationPtr make_operation(OpCode op) const;
  Deadline deadline_from_now() const;
  // The part of a description that peers compare: with check="off" only the size.
  Descriptor checked(const Descriptor& descriptor) const;
  // Posts the requests of an operation.
  void post(const OperationPtr& operation, bool is_async = true);
  // In one order on all ranks. `collective.members` are those of a scope that has been checked.
  void post_collective(Collective collective, int channel, bool is_async = true);
  // Calls `post` after the earlier posts on this channel of the user, and after `after` (or null).
  void post_after(int channel, const OperationPtr& after, const OperationPtr& operation,
                  std::function<void()> post) {
    sequencers_[channel]->submit(after, operation, std::move(post));
  }
  // A barrier of the hosts, as a part of a call of `op`.
  OperationPtr post_barrier(bool is_async, OpCode op = OpCode::barrier);
  OperationPtr post_refusal(OpCode op, const std::string& reason, const Scope& scope);
  // For operations without requests. While the lock is held, no other call is posted, and no thread
  // closes the communicator. Throws if the communicator is not usable.
  [[nodiscard]] std::unique_lock<std::mutex> lock_posts(OpCode op);
  // Assigns its place in the order of posts; with that lock.
  void number(Operation& operation) { operation.record_in(flight_record_, num_posted_++); }
  // From now on it has a deadline and fails with the communicator. Called before its messages are
  // posted, since a message to a lost peer would otherwise end without the cause.
  void note_in_flight(const OperationPtr& operation);
  // Blocks until the operation is done and throws its failure, if any; false if `until` passes
  // first.
  bool wait(Operation& operation, Deadline until, const Interrupted& interrupted);
  // The latest operations that have ended, and all that have not, by number.
  std::vector<Flight> flights() const;
  // The states that its connections have entered, and it itself; none in a fork.
  std::vector<ConnectionEvent> connections() const;

  // Throws PipeCommException in a fork.
  void check_process() const;
  // Also throws it, with the original cause, once the communicator has failed or is closed.
  void check_usable(OpCode op) const;
  // Threads and connections stay with the process that made them: in a fork every call is refused,
  // close() does nothing, and the object must not be destroyed.
  bool is_in_fork() const { return fork_mark_.is_in_fork(); }
  // A failure that begins on this rank.
  Failure own_failure(FailureKind kind, std::string message, std::string op = "") const {
    return {.kind = kind,
            .message = std::move(message),
            .op = std::move(op),
            .rank = rank(),
            .origin_rank = rank()};
  }
  // The failure of all operations from now on, on all ranks; the first one counts.
  void fail(Failure failure);
  // `cause`: the failure of another communicator of the same ranks, to report instead; or null.
  void abort(const std::string& reason, const FailurePtr& cause = nullptr);
  FailurePtr failure() const;

  // Finishes the operations in flight, says goodbye and releases everything. Throws if operations
  // were still pending when their deadline passed. If `interrupted` throws, the communicator is
  // aborted and closed all the same, and the exception is rethrown. Idempotent. After `patience`,
  // receives in host memory that no message has met are given up.
  void close(const Interrupted& interrupted, std::optional<std::chrono::nanoseconds> patience = {});
  bool closed() const { return state_ == CommunicatorState::closed; }

 protected:
  explicit Dispatch(const CommunicatorOptions& options);
  ~Dispatch() override = default;  // after drop() or close(), or before start()
  // Does not wait for other ranks. `events` outlives the transport, which is closed by drop() or
  // close(). If it throws, drop() must not be called.
  void start(const MakeTransport& make_transport, DispatchEvents& events);
  // Ends what close() has not ended, without waiting for operations.
  void drop();

 private:
  static constexpr auto kTick = std::chrono::milliseconds(20);
  // The interval of an idle watchdog: nothing was in flight for kTicksUntilIdle ticks. A post wakes it.
  static constexpr auto kIdleTick = std::chrono::milliseconds(250);
  static constexpr int kTicksUntilIdle = 10;

  void on_peer_lost(int peer, const std::string& why) override;
  void on_remote_failure(const Failure& failure) override;
  void on_refused(int peer, const std::string& why) override;
  void on_broken(const std::string& why) override;
  void on_control(int peer, std::span<const std::byte> message) override;

  // The communicator's failure as one of its operations reports it, with the message that it was
  // waiting for.
  static FailurePtr failure_for(const FailurePtr& failure, const Operation& operation);
  void enter(CommunicatorState state, const std::string& why = "");
  void note_ended(const Operation& operation);
  std::vector<OperationPtr> in_flight() const;
  void tell_peers(const Failure& failure);
  void watch();
  void expire(Operation& operation);
  void end();

  const CommunicatorOptions options_;
  std::vector<int> others_;
  const ForkMark fork_mark_;
  FlightRecord flight_record_;
  const std::shared_ptr<ConnectionEvents> connection_events_ = std::make_shared<ConnectionEvents>();
  DispatchEvents* events_ = nullptr;

  std::mutex failing_mutex_;  // held before mutex_
  std::mutex telling_mutex_;
  mutable std::mutex mutex_;
  FailurePtr failure_;
  Queue<std::weak_ptr<Operation>> in_flight_;  // in post order, so in order of deadlines
  size_t sweep_at_ = 0;                        // length at which finished ones are removed
  std::atomic<CommunicatorState> state_{CommunicatorState::open};

  std::vector<std::unique_ptr<Sequencer>> sequencers_;  // one per channel of the user
  std::mutex post_mutex_;  // the order of posts is the order of matches
  uint64_t num_posted_ = 0;
  uint64_t num_collectives_ = 0;  // with refused ones, so that all ranks count the same
  std::unique_ptr<HostTransport> transport_;
  std::unique_ptr<CollectiveLine> line_;  // null: collectives are direct
  std::condition_variable wake_watchdog_;
  bool stop_watching_ = false;
  bool is_watchdog_idle_ = false;
  std::thread watchdog_;
};

}  // namespace pipecomm
