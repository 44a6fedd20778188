// Execution for tensors in device memory. NCCL moves the data, enqueued on streams: no call waits
// for the device. The hosts' messages are the control plane: over them the Communicator notices
// dead peers, forwards a failure of one rank to all others, and compares the calls of ranks.
//
// Streams. A synchronous operation runs on the caller's current stream. An asynchronous one runs on
// the streams of its lanes, after the work that the caller's stream has at that moment. The
// messages from one rank to another one on a channel have a lane of their own (see links.h), so
// that none waits behind a message of another channel, another rank or the other direction.
// Exchanges of a channel run one after another on one stream, regardless of their members; those of
// the same ranks share a communicator, in which each is one kernel. The first call that needs a
// lane waits until it is made.
//
// Checks. Each end announces its description of a message or collective on the control plane, where
// it is compared in parallel with the transfer (MessageCheck): when it is new, or with Check::full
// always; synchronous calls and collectives then wait for that before they enqueue anything. A
// disagreement fails the communicator. Inside a graph capture nothing can be compared, so every
// message must be known.
#pragma once

#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "copy/device_runtime.h"
#include "engine/device/in_flight.h"
#include "engine/device/lane_batch.h"
#include "engine/device/links.h"
#include "engine/device/peer_checks.h"
#include "engine/device/replays.h"
#include "engine/dispatch.h"
#include "engine/execution.h"
#include "transport/nccl/nccl_reductions.h"
#include "transport/nccl/nccl_transport.h"

namespace pipecomm {

struct DeviceOptions {
  Check check = Check::first_use;
  int max_ops_per_group = kDefaultMaxOpsPerGroup;
  NcclConfig nccl;
  uint64_t host = 0;            // ranks with the same one are on one host; 0: not known
  std::string capture_problem;  // why nothing can be captured, or ""
  // Limit of each step of the shutdown that other ranks, the driver or the user's graphs can block.
  std::chrono::nanoseconds end_limit = std::chrono::seconds(5);
};

class DeviceExecution final : public Execution {
 public:
  DeviceExecution(Dispatch& dispatch, const DeviceOptions& options,
                  std::shared_ptr<DeviceRuntime> runtime, const NcclApi& api);

  void start() override;
  // Begins to make links; also that of the collectives if `channels` is none and `peers` are all.
  void connect(std::span<const int> peers, const std::optional<std::vector<int>>& channels,
               std::optional<Direction> direction) override;
  void connect(const Scope& scope) override;

  // Tensors may have any strides. Exchanges on a channel of the user run one after another on its
  // stream, which waits for `after`; if that is one of the hosts' operations, the call does.
  // `gradient_of` is not compared: it would make each exchange a new one.
  OperationPtr batch_p2p(std::span<const PointToPoint> batch, CallOptions options) override;
  OperationPtr exchange(const ExchangeCall& call, CallOptions options) override;
  OperationPtr broadcast(const TensorRef& tensor, int source, CallOptions options) override;
  // By NCCL's own functions, on the communicator of the collectives. The first that takes an
  // algorithm connects the ranks, and waits in NCCL until all have come, which only a revoke can end.
  bool can_reduce(OpCode op, Reduction reduction, DType dtype) const override {
    return (!nccl_ || nccl_->can_revoke()) &&
           (op == OpCode::all_gather || nccl_reduces(reduction, dtype));
  }
  OperationPtr reduce(const ReduceCall& call, CallOptions options) override;
  OperationPtr barrier(bool is_async) override;
  // The communicator fails on all ranks, unless the others refuse the same collective.
  OperationPtr refuse(OpCode op, const std::string& reason, const Scope& scope) override;

  bool follow(Operation& operation) override;
  bool poll(Operation& operation) override;
  bool assist(Operation& operation) override;
  bool is_late(const Operation& operation) const override;
  bool tick() override;
  void expire(const Operation& operation) override;
  void on_control(int peer, std::span<const std::byte> bytes) override;

  // Return within a few seconds after the last operation, even if the shutdown of NCCL is blocked.
  void finish(const Interrupted& interrupted) override;
  void end(bool in_order) override;
  std::string end_warning() const override { return end_warning_; }
  std::string take_warning() override;

  CopyCounters copy_counters() const override { return {num_exchanges_, num_passes_, 0}; }
  DeviceUsage device_usage() const override;

 private:
  int rank() const { return dispatch_.rank(); }
  int size() const { return dispatch_.size(); }
  int num_channels() const { return dispatch_.options().num_channels; }

  // The key of the communicator of an exchange.
  LaneKey lane_of_exchange(const Scope& scope) const {
    const std::vector<int>& ranks = scope.within.empty() ? scope.members : scope.within;
    return {scope.channel, ranks.size() == size_t(size()) ? std::vector<int>{} : ranks};
  }
  void require_links(OpCode op, std::span<const LaneKey> keys, const Interrupted& interrupted);
  void check_answer(OpCode op, const LaneKey& key, Clock::time_point begin, Deadline deadline);
  uint64_t check_captures(OpCode op, std::span<const LaneKey> lanes) const;
  DeviceOperationPtr make_operation(OpCode op, bool is_async, uint64_t capture);
  void enter(DeviceOperation& operation, const Lane& lane, StreamHandle stream,
             const EventPtr& start);
  void leave(DeviceOperation& operation, Lane& lane, StreamHandle stream);
  bool must_follow(DeviceOperation& earlier, uint64_t capture, const char* call);
  void publish(const DeviceOperationPtr& operation);
  template <class Launch>
  void launch(const DeviceOperationPtr& operation, Launch&& body);
  template <class Reserve, class Launch>
  OperationPtr run_collective(const CollectiveCall& call, std::span<const TensorRef> inputs,
                              std::span<const TensorRef> outputs, CallOptions options,
                              Reserve&& reserve, Launch&& body);
  void meet_for_first(OpCode op, const Interrupted& interrupted);
  NcclTransport::KeepWaiting keep_waiting(Deadline deadline) const;

  std::function<bool(int peer)> has_closed() const {
    return [this](int peer) { return dispatch_.transport().has_closed(peer); };
  }
  void fail(FailureKind kind, const std::string& message, const std::string& op = "") {
    dispatch_.fail(dispatch_.own_failure(kind, message, op));
  }
  void fail_expired(const Replays::Late& late);
  void fail_expired(OpCode op, const std::string& where, const std::string& remedy,
                    const FlightMessage* shown, Clock::duration elapsed, Clock::duration limit);
  void fail_enqueue(OpCode op, const std::exception& error);
  void fail_connecting(OpCode op, const LinkError& error);
  void fail_posting(OpCode op, const std::string& why, bool is_peer);

  void look_for_trouble();
  void abort_nccl();

  Deadline patience_with_peers() const;
  bool meet(const Interrupted& interrupted);
  void stop_looking();
  std::future<void> run_apart(std::function<void()> body) const;

  Dispatch& dispatch_;
  const DeviceOptions options_;
  const std::optional<std::chrono::nanoseconds> timeout_;
  const std::shared_ptr<DeviceRuntime> runtime_;
  PeerChecks checks_;
  std::shared_ptr<NcclTransport> nccl_;  // null if there are no other ranks
  const std::shared_ptr<Links> links_;
  std::shared_ptr<InFlight> in_flight_;
  Replays replays_;
  std::set<uint64_t> kinds_;  // of the reductions so far; with the lock of posts

  std::atomic<int64_t> num_exchanges_{0};
  std::atomic<int64_t> num_passes_{0};

  std::mutex tick_mutex_;
  bool is_looking_ = false;                            // under tick_mutex_
  std::optional<Clock::time_point> nccl_error_since_;  // tick() only
  std::future<void> aborted_;                          // tick(), then end(); if NCCL is aborted
  bool all_have_come_ = false;                         // all ranks, to the meeting at the end
  std::string end_warning_;
  std::atomic<bool> has_warned_{false};
};

class Communicator;
std::unique_ptr<Communicator> make_device_communicator(
    CommunicatorOptions options, const DeviceOptions& device_options,
    const std::shared_ptr<DeviceRuntime>& runtime, const NcclApi& api,
    const Dispatch::MakeTransport& make_transport);

}  // namespace pipecomm
