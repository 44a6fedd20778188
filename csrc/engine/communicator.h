// The engine: checks the arguments of calls and lets an Execution move their data. It knows tensors
// only as addresses, shapes and strides.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/dispatch.h"
#include "engine/execution.h"
#include "engine/point_to_point.h"
#include "engine/staging.h"

namespace pipecomm {

class Communicator final : public Dispatch {
 public:
  using MakeExecution = std::function<std::unique_ptr<Execution>(Dispatch&)>;
  // Does not wait for other ranks. Without `make_execution` its execution is a HostExecution.
  Communicator(const CommunicatorOptions& options, const MakeTransport& make_transport,
               const MakeExecution& make_execution = nullptr);
  ~Communicator() override;

  // All calls below throw std::invalid_argument before anything is posted, or PipeCommException
  // with the original cause once the communicator has failed or is closed.
  //
  // Point-to-point: one group of messages.
  OperationPtr batch_p2p(std::span<const PointToPoint> batch, CallOptions options = {});

  // Collectives: every rank gets a report from every other one, so all learn of a rank that
  // refuses. An exchange on a channel of the user is posted when all earlier ones on that channel
  // are, and `after`, if given, has succeeded; it fails if `after` fails. The caller does not wait
  // for that.
  OperationPtr exchange(OpCode op, const PreparedExchangePtr& plan,
                        std::span<const TensorRef> inputs, std::span<const TensorRef> outputs,
                        CallOptions options = {}, const Scope& scope = {},
                        const OperationPtr& after = nullptr);
  OperationPtr broadcast(const TensorRef& tensor, int source, CallOptions options = {});
  // One operation, for which Execution::can_reduce must be true.
  OperationPtr reduce(const ReduceCall& call, CallOptions options = {});
  // Synchronizes the hosts of all ranks, independent of the work on streams.
  OperationPtr barrier(bool is_async = true);
  // Called instead of a collective that this rank cannot take part in. Done once all others have
  // received the refusal.
  OperationPtr refuse(OpCode op, const std::string& reason, const Scope& scope = {});
  // Begins to connect to these ranks, see HostTransport::connect and Execution::connect.
  void connect(std::span<const int> peers,
               const std::optional<std::vector<int>>& channels = std::nullopt,
               std::optional<Direction> direction = std::nullopt);
  // Begins to connect these ranks for their exchanges on a channel.
  void connect(const Scope& scope);

  // Orders the caller's next work, on the host or on its current stream, after the operation.
  void follow(Operation& operation, const Interrupted& interrupted);
  // Whether it has ended, with or without a failure.
  bool is_completed(Operation& operation);

  // For what needs no check: its warnings, its counters.
  Execution& execution() const { return *execution_; }
  StagingPool scratch;  // host memory for intermediate results of one call

 private:
  const std::unique_ptr<Execution> execution_;
};

}  // namespace pipecomm
