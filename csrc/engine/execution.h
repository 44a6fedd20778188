// Moves the data of a communicator's calls: by messages between hosts, or on streams of a device.
//
// An execution makes the operation of a call, whose arguments the Communicator has checked, and posts
// it through the Dispatch.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "engine/dispatch.h"
#include "engine/point_to_point.h"
#include "engine/prepared_exchange.h"
#include "engine/reduce_call.h"
#include "message/operation.h"
#include "transport/transport.h"

namespace pipecomm {

struct CallOptions {
  bool is_async = true;  // false: the caller waits for the operation next, on the same thread
  Interrupted interrupted =
      nullptr;  // for a call that waits for messages of other ranks before it returns
};

struct ExchangeCall {
  OpCode op;
  const PreparedExchangePtr& prepared;
  const std::shared_ptr<const LoweredExchange>& lowered;  // for these tensors
  std::span<const TensorRef> inputs, outputs;
  const Scope& scope;
  const OperationPtr& after;  // must succeed first; or null
};

// Bytes and passes that exchanges of this communicator have copied, for tests and benchmarks.
struct CopyCounters {
  int64_t num_exchanges = 0;
  int64_t num_passes = 0;
  int64_t num_staging_allocations = 0;
};

// The NCCL communicators of an execution, and the device memory that their creation took.
struct DeviceUsage {
  int num_nccl_comms = 0;
  int64_t num_bytes = 0;
};

class Execution : public DispatchEvents {
 public:
  // Before the first call, once the Dispatch has its transport.
  virtual void start() {}

  virtual OperationPtr batch_p2p(std::span<const PointToPoint> batch, CallOptions options) = 0;
  // Whether every message of an exchange must be in staging memory.
  virtual bool stages_all() const { return false; }
  virtual OperationPtr exchange(const ExchangeCall& call, CallOptions options) = 0;
  virtual OperationPtr broadcast(const TensorRef& tensor, int source, CallOptions options) = 0;
  // Whether reduce() does it. If not, the caller exchanges tensors, and reduces them itself.
  virtual bool can_reduce(OpCode /*op*/, Reduction /*reduction*/, DType /*dtype*/) const {
    return false;
  }
  virtual OperationPtr reduce(const ReduceCall& /*call*/, CallOptions /*options*/) {
    throw std::logic_error("this communicator does not reduce tensors in one operation");
  }
  // These two move no data.
  virtual OperationPtr barrier(bool is_async) = 0;
  virtual OperationPtr refuse(OpCode op, const std::string& reason, const Scope& scope) = 0;

  // Prepares messages to or from these ranks, or both, where that needs more than the transport; on
  // these channels of the user, or on all. For all channels, directions and ranks, it also prepares
  // the collectives. Does not wait for other ranks.
  virtual void connect(std::span<const int> /*peers*/,
                       const std::optional<std::vector<int>>& /*channels*/,
                       std::optional<Direction> /*direction*/) {}
  // Prepares exchanges on a channel among the ranks of `within`, or the members, see Scope.
  virtual void connect(const Scope& /*scope*/) {}

  // Makes the caller's stream wait for the operation; false if only a host can wait for it.
  virtual bool follow(Operation& /*operation*/) { return false; }
  // Whether it has ended; asks the device or transport if nothing reports that.
  virtual bool poll(Operation& operation) { return operation.done(); }

  // A warning for the user about the calls so far, returned once; or "".
  virtual std::string take_warning() { return ""; }
  // A warning about what end() has left behind, and how to avoid it; or "".
  virtual std::string end_warning() const { return ""; }

  virtual CopyCounters copy_counters() const = 0;
  virtual DeviceUsage device_usage() const { return {}; }
};

}  // namespace pipecomm
