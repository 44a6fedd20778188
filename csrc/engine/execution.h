// How the data of a communicator's calls move: by messages between hosts, or on streams of a device.
//
// The Communicator checks the arguments of a call, keeps the order of calls, compares them with other
// ranks over its HostTransport, and knows of deadlines, failures and the end. An execution makes the
// operation of a call and posts it through the Communicator, to which it belongs.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/point_to_point.h"
#include "engine/prepared_exchange.h"
#include "message/operation.h"
#include "transport/transport.h"

namespace pipecomm {

// Asked now and then on a thread that waits, if there is one; may throw (pending signals).
using Interrupted = std::function<void()>;

// Who takes part in a collective, and in which order of messages.
struct Scope {
  std::vector<int> members;          // increasing, this rank among them; empty: all ranks
  int channel = kCollectiveChannel;  // or one of the user's
  // Increasing, the members among them: the ranks whose exchanges it shares a communicator with; empty:
  // the members. The same on all of them.
  std::vector<int> within = {};
  // The number of the collective whose gradients this one moves, which the ranks compare; or 0.
  uint64_t gradient_of = 0;
};

struct CallOptions {
  bool is_async = true;  // false: the caller waits for the operation next, on the same thread
  Interrupted interrupted =
      nullptr;  // of a call that has to hear from other ranks before it returns
};

struct ExchangeCall {
  OpCode op;
  const PreparedExchangePtr& prepared;
  const std::shared_ptr<const LoweredExchange>& lowered;  // for these tensors
  std::span<const TensorRef> inputs, outputs;
  const Scope& scope;
  const OperationPtr& after;  // or null: what must succeed first
};

// Bytes and passes that exchanges of this communicator have copied, for tests and benchmarks.
struct CopyCounters {
  int64_t num_exchanges = 0;
  int64_t num_passes = 0;
  int64_t num_staging_allocations = 0;
};

// What the execution has made on the device for messages, and the memory that was taken meanwhile.
struct DeviceUsage {
  int num_nccl_comms = 0;
  int64_t num_bytes = 0;
};

class Execution {
 public:
  virtual ~Execution() = default;

  // Before the first call, once the Communicator has its transport.
  virtual void start() {}

  virtual OperationPtr batch_p2p(std::span<const PointToPoint> batch, CallOptions options) = 0;
  // Whether every message of an exchange has to lie in staging memory.
  virtual bool stages_all() const { return false; }
  virtual OperationPtr exchange(const ExchangeCall& call, CallOptions options) = 0;
  virtual OperationPtr broadcast(const TensorRef& tensor, int source, CallOptions options) = 0;
  // These two move no data.
  virtual OperationPtr barrier(bool is_async) = 0;
  virtual OperationPtr refuse(OpCode op, const std::string& reason, const Scope& scope) = 0;

  // Prepares messages to or from these ranks, or both, if more than the transport has to; on these
  // channels of the user, or on all. Of all channels, both ways and all ranks, the collectives, too.
  // Waits for nobody.
  virtual void connect(std::span<const int> /*peers*/,
                       const std::optional<std::vector<int>>& /*channels*/,
                       std::optional<Direction> /*direction*/) {}
  // Prepares exchanges on a channel, see Scope: of `within`, or of the members.
  virtual void connect(const Scope& /*scope*/) {}
  // The execution of a peer has sent this, see HostTransport::send_control.
  virtual void on_control(int /*peer*/, std::span<const std::byte> /*message*/) {}

  // Makes the caller's stream wait for the operation; false if only a host can wait for it.
  virtual bool follow(Operation& /*operation*/) { return false; }
  // Finds out whether it has ended, if nobody is told.
  virtual bool poll(Operation& operation) { return operation.done(); }
  // Lends it a thread that waits, see HostTransport.
  virtual bool assist(Operation& operation) = 0;
  virtual bool is_late(const Operation& operation) const {
    return Clock::now() >= operation.deadline();
  }
  // Looks for trouble on a thread of the Communicator, as often as HostTransport::tick().
  virtual bool tick() { return false; }
  // Fails the communicator because of an operation on a device that is late.
  virtual void expire(const Operation& /*operation*/) {}

  // The end of a communicator that is closing: waits for what is in flight, and throws its failure.
  virtual void finish(const Interrupted& /*interrupted*/) {}
  // Moves nothing any more. In order: after finish(), if the communicator has not failed.
  virtual void end(bool /*in_order*/) {}
  // What the user should know of the calls so far, once; or "".
  virtual std::string take_warning() { return ""; }
  // What the end has left behind, and how to avoid it; or "".
  virtual std::string end_warning() const { return ""; }

  virtual CopyCounters copy_counters() const = 0;
  virtual DeviceUsage device_usage() const { return {}; }
};

}  // namespace pipecomm
