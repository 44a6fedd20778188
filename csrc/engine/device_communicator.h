// The engine for tensors in device memory. The data go over NCCL, enqueued on streams: no call
// waits for the device. A host communicator is the control plane: it notices dead peers, carries a
// failure of one rank to all others, and compares what ranks are about to do.
//
// Streams. A synchronous operation runs on the caller's current stream. An asynchronous one runs on
// the stream of its channel, after what the caller's stream holds at that moment. Each channel (and
// the collectives) has an NCCL communicator and a stream of its own, so that a send of one channel
// never waits behind a receive of another.
//
// Checks. Before a collective runs for the first time, ranks agree on the control plane; from then
// on it runs without host traffic. Messages are compared behind the transfer (MessageCheck). Inside
// a graph capture there is no host traffic at all, so whatever would need some is refused.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "copy/device_runtime.h"
#include "engine/communicator.h"
#include "engine/device_operation.h"
#include "engine/message_check.h"
#include "transport/nccl_transport.h"

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
};

class DeviceCommunicator {
 public:
  // Asked now and then on a thread that waits; may throw (pending signals).
  using Interrupted = std::function<void()>;

  // Collective. `nccl_ids`: one per channel and one for the collectives, the same on all ranks.
  DeviceCommunicator(const DeviceOptions& options, std::shared_ptr<DeviceRuntime> runtime,
                     const NcclApi& api, std::span<const NcclUniqueId> nccl_ids,
                     const Communicator::MakeTransport& make_control,
                     const Interrupted& interrupted);
  ~DeviceCommunicator();

  int rank() const { return options_.rank; }
  int size() const { return options_.size; }
  static int num_nccl_ids(int num_channels) { return num_channels + 1; }
  const std::shared_ptr<Communicator>& control() const { return control_; }
  bool is_in_fork() const { return control_->is_in_fork(); }

  // As for the host communicator; `interrupted` serves the agreement of a first use. Receives may
  // have any strides; sends are contiguous. On a channel of the user nobody waits for the
  // agreement, and exchanges follow each other on its stream.
  DeviceOperationPtr batch_p2p(std::span<const PointToPoint> batch, bool is_async);
  DeviceOperationPtr exchange(OpCode op, PreparedExchangePtr plan,
                              std::span<const TensorRef> inputs, std::span<const TensorRef> outputs,
                              bool is_async, const Interrupted& interrupted,
                              const Scope& scope = {});
  DeviceOperationPtr broadcast(const TensorRef& tensor, int source, bool is_async,
                               const Interrupted& interrupted);
  // Of the hosts, an operation of control(): says nothing about work on streams.
  OperationPtr barrier(bool is_async = true);
  // Instead of a collective that this rank cannot take part in. If the others have run it before,
  // they are not asking any more: then the communicator fails, on all ranks.
  void refuse(OpCode op, const std::string& reason, const Scope& scope = {});

  // Makes the current stream wait for the operation.
  void wait(DeviceOperation& operation);
  // Blocks the host until the operation is done; false if `until` passes first.
  bool synchronize(DeviceOperation& operation, Deadline until, const Interrupted& interrupted);
  bool is_completed(DeviceOperation& operation);

  void abort(const std::string& reason) { control_->abort(reason); }
  void close(const Interrupted& interrupted);
  bool closed() const { return closed_; }
  FailurePtr failure() const { return control_->failure(); }
  // As for the host communicator; with the operations of the control plane, which are numbered
  // apart.
  std::vector<Flight> flights() const;
  CopyCounters copy_counters() const { return {num_exchanges_, num_passes_, 0}; }

 private:
  // An NCCL communicator with its stream, and the end of its latest operation.
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
  DeviceOperationPtr make_operation(OpCode op, bool is_async);
  void check_messages(std::span<const PointToPoint> batch, DeviceOperation& operation);
  void note_message(DeviceOperation& operation, Direction direction, int peer,
                    Descriptor descriptor);
  void agree(OpCode op, const TensorRef& shown, uint64_t signature, const Interrupted& interrupted,
             const Scope& scope = {});
  StreamHandle enter(DeviceOperation& operation, int lane_idx, bool on_caller,
                     const EventPtr& start);
  void leave(DeviceOperation& operation, int lane_idx, StreamHandle stream);
  void publish(const DeviceOperationPtr& operation);
  template <class Launch>
  void launch(DeviceOperation& operation, Launch&& body);
  NcclTransport::KeepWaiting keep_waiting(Deadline deadline) const;

  void fail_mismatch(const MessageCheck::Mismatch& mismatch);
  void fail_expired(const DeviceOperation& operation);
  void throw_failure() const;
  bool poll_done(DeviceOperation& operation);
  void note_done(DeviceOperation& operation);
  void write_down(const DeviceOperation& operation, FailurePtr failure);
  void sweep();

  void watch();
  void watch_once();
  void abort_nccl();

  const DeviceOptions options_;
  const std::shared_ptr<DeviceRuntime> runtime_;
  MessageCheck check_;
  FlightRecord flight_record_;
  std::shared_ptr<Communicator> control_;
  std::shared_ptr<NcclTransport> nccl_;  // null if there are no other ranks

  std::mutex launch_mutex_;  // one host order of everything enqueued
  uint64_t num_launched_ = 0;
  std::vector<uint64_t> num_noted_;  // messages in the flight record, see note_message()
  std::vector<Lane> lanes_;          // one per channel, then the collectives'
  std::mutex collective_mutex_;      // the order of agreements is the order of collectives
  std::set<std::pair<OpCode, uint64_t>> agreed_;
  std::atomic<int64_t> num_exchanges_{0};
  std::atomic<int64_t> num_passes_{0};

  mutable std::mutex mutex_;
  std::deque<DeviceOperationPtr> in_flight_;
  std::deque<Pending> pending_;
  std::condition_variable stop_watch_;
  bool stop_watching_ = false;
  std::atomic<bool> closing_{false};
  std::atomic<bool> closed_{false};

  std::optional<Clock::time_point> nccl_error_since_;  // watchdog only
  bool nccl_aborted_ = false;                          // watchdog, then close()
  std::thread watchdog_;
};

}  // namespace pipecomm
