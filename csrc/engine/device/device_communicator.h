// The engine for tensors in device memory. The data go over NCCL, enqueued on streams: no call
// waits for the device. A host communicator is the control plane: it notices dead peers, carries a
// failure of one rank to all others, and compares what ranks are about to do.
//
// Streams. A synchronous operation runs on the caller's current stream. An asynchronous one runs on
// the streams of its lanes, after what the caller's stream holds at that moment. Each channel has a
// lane for messages to higher ranks and one for messages to lower ranks (see lane_batch.h), so that
// a send never waits behind a receive of another channel or from the other direction.
//
// Checks. Before a collective runs for the first time, ranks compare it on the control plane
// (Agreement); from then on it runs without host traffic. Point-to-point messages are compared
// behind the transfer (MessageCheck). Inside a graph capture there is no host traffic at all, so
// calls that would need some are refused.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "copy/device_runtime.h"
#include "engine/communicator.h"
#include "engine/device/in_flight.h"
#include "engine/device/lane_batch.h"
#include "engine/device/message_check.h"
#include "engine/device/message_counts.h"
#include "engine/device/replays.h"
#include "transport/nccl/nccl_transport.h"

namespace pipecomm {

struct DeviceOptions {
  int rank = 0;
  int size = 1;
  int num_channels = 2;
  std::optional<std::chrono::nanoseconds> timeout;  // none: wait forever
  Check check = Check::first_use;
  std::function<void()> on_failure;  // see CommunicatorOptions
  int max_ops_per_group = kDefaultMaxOpsPerGroup;
  NcclConfig nccl;
  // Of each step of the end that other ranks, the driver or the user's graphs can hold up.
  std::chrono::nanoseconds end_limit = std::chrono::seconds(5);
};

class DeviceCommunicator {
 public:
  // Asked now and then on a thread that waits; may throw (pending signals).
  using Interrupted = std::function<void()>;

  // Collective. `nccl_ids`: one per lane, the same on all ranks.
  DeviceCommunicator(const DeviceOptions& options, std::shared_ptr<DeviceRuntime> runtime,
                     const NcclApi& api, std::span<const NcclUniqueId> nccl_ids,
                     const Communicator::MakeTransport& make_control,
                     const Interrupted& interrupted);
  ~DeviceCommunicator();

  int rank() const { return options_.rank; }
  int size() const { return options_.size; }
  static int num_nccl_ids(int num_channels) { return num_lanes(num_channels); }
  const std::shared_ptr<Communicator>& control() const { return control_; }
  bool is_in_fork() const { return control_->is_in_fork(); }

  // As for the host communicator; `interrupted` serves the agreement of a first use. Tensors may
  // have any strides. An exchange on a channel of the user is compared while it runs, and exchanges
  // follow each other on its first lane.
  DeviceOperationPtr batch_p2p(std::span<const PointToPoint> batch, bool is_async);
  DeviceOperationPtr exchange(OpCode op, PreparedExchangePtr plan,
                              std::span<const TensorRef> inputs, std::span<const TensorRef> outputs,
                              bool is_async, const Interrupted& interrupted,
                              const Scope& scope = {});
  DeviceOperationPtr broadcast(const TensorRef& tensor, int source, bool is_async,
                               const Interrupted& interrupted);
  // Meets the hosts of all ranks (an operation of control()), whatever runs on streams.
  OperationPtr barrier(bool is_async = true);
  // Call it instead of a collective that this rank cannot take part in. If the others have run that
  // collective before, they no longer compare it, and the communicator fails on all ranks.
  void refuse(OpCode op, const std::string& reason, const Scope& scope = {});

  // Makes the current stream wait for the operation.
  void wait(DeviceOperation& operation);
  // Blocks the host until the operation is done; false if `until` passes first.
  bool synchronize(DeviceOperation& operation, Deadline until, const Interrupted& interrupted);
  bool is_completed(DeviceOperation& operation);

  void abort(const std::string& reason) { control_->abort(reason); }
  // Returns within a few seconds after the last operation, whatever holds up the end of NCCL.
  void close(const Interrupted& interrupted);
  // What close() has left behind, and how to avoid it; or "".
  const std::string& end_warning() const { return end_warning_; }
  bool closed() const { return closed_; }
  FailurePtr failure() const { return control_->failure(); }
  // As for the host communicator; with the operations of the control plane, which are numbered
  // apart.
  std::vector<Flight> flights() const;
  CopyCounters copy_counters() const { return {num_exchanges_, num_passes_, 0}; }

 private:
  // The stream of a lane, and the end of its latest operation.
  struct Lane {
    StreamHandle stream = nullptr;
    StreamHandle last_stream = nullptr;
    EventPtr last_end;
  };
  // What is verified behind the transfer, or refused.
  struct Pending {
    OperationPtr operation;
    std::optional<Failure> failure_if_unheard;  // after kRefusalLimit
    Clock::time_point since;
  };

  void connect(std::span<const NcclUniqueId> nccl_ids, const Interrupted& interrupted);
  void check_usable(OpCode op) const;
  uint64_t check_captures(OpCode op, std::span<const int> lanes) const;
  std::vector<int> forked_lanes(int channel, std::span<const PeerMessages> pairs,
                                bool is_async) const;
  DeviceOperationPtr make_operation(OpCode op, bool is_async, uint64_t capture);
  void check_messages(std::span<const PointToPoint> batch, DeviceOperation& operation);
  void note_captured(int peer, Direction direction, const Descriptor& descriptor);
  void note_message(DeviceOperation& operation, Direction direction, int peer,
                    Descriptor descriptor);
  void agree(OpCode op, std::span<const PeerMessages> pairs, const Scope& scope,
             const Interrupted& interrupted);
  void claim_new(std::span<const PeerMessages> pairs, std::span<const PeerMessages> fresh);
  void await_agreement(OpCode op, Operation& operation, const Agreement& agreement,
                       bool is_new_to_all, const Interrupted& interrupted);
  StreamHandle enter(DeviceOperation& operation, int lane_idx, bool on_caller,
                     const EventPtr& start);
  EventPtr leave(DeviceOperation& operation, int lane_idx, StreamHandle stream);
  void publish(const DeviceOperationPtr& operation);
  void exchange_messages_on(DeviceOperation& operation, int channel, StreamHandle stream,
                            std::span<const DeviceMessage> messages);
  template <class Launch>
  void launch(const DeviceOperationPtr& operation, Launch&& body);
  NcclTransport::KeepWaiting keep_waiting(Deadline deadline) const;

  void fail_mismatch(const MessageCheck::Mismatch& mismatch);
  void fail_expired(const DeviceOperation& operation);
  void fail_expired(const Replays::Late& late);
  void fail_expired(OpCode op, const std::string& where, const std::string& remedy,
                    const FlightMessage* shown, Clock::duration elapsed, Clock::duration limit);
  void fail_enqueue(OpCode op, const std::exception& error);
  void throw_failure() const;

  void watch();
  void watch_once();
  void abort_nccl();

  void on_claim(int peer, Direction direction, const Descriptor& theirs);
  void check_open(OpCode op, Direction direction, int peer, int channel) const;
  void check_unmatched();
  void say_closing();
  bool meet(const Interrupted& interrupted);
  void end_nccl(const Interrupted& interrupted);
  bool run_apart(std::function<void()> body, std::chrono::nanoseconds limit) const;

  const DeviceOptions options_;
  const std::shared_ptr<DeviceRuntime> runtime_;
  MessageCheck check_;
  std::shared_ptr<Communicator> control_;
  std::shared_ptr<NcclTransport> nccl_;  // null if there are no other ranks
  std::shared_ptr<InFlight> in_flight_;
  Replays replays_;

  std::mutex launch_mutex_;  // one host order of everything enqueued
  uint64_t num_launched_ = 0;
  MessageCounts counts_;
  std::vector<Lane> lanes_;
  std::mutex collective_mutex_;       // the order of agreements is the order of collectives
  std::map<OpCode, int> num_agreed_;  // under collective_mutex_
  std::atomic<int64_t> num_exchanges_{0};
  std::atomic<int64_t> num_passes_{0};

  mutable std::mutex mutex_;
  std::deque<Pending> pending_;
  std::condition_variable stop_watch_;
  bool stop_watching_ = false;
  std::atomic<bool> closing_{false};
  std::atomic<bool> closed_{false};

  std::optional<Clock::time_point> nccl_error_since_;  // watchdog only
  bool nccl_aborted_ = false;                          // watchdog, then close()
  bool abort_is_stuck_ = false;                        // likewise
  std::atomic<bool> has_captured_{false};
  std::vector<bool> drained_;  // peers that have closed and have nothing in flight
  std::string end_warning_;
  std::thread watchdog_;
};

}  // namespace pipecomm
