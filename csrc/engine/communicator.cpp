#include "engine/communicator.h"

#include "engine/host_execution.h"

namespace pipecomm {

Communicator::Communicator(const CommunicatorOptions& options, const MakeTransport& make_transport,
                           const MakeExecution& make_execution)
    : Dispatch(options),
      execution_(make_execution ? make_execution(*this) : std::make_unique<HostExecution>(*this)) {
  start(make_transport, *execution_);
  try {
    execution_->start();
  } catch (...) {
    drop();
    throw;
  }
}

Communicator::~Communicator() { drop(); }

OperationPtr Communicator::batch_p2p(std::span<const PointToPoint> batch, CallOptions options) {
  check_usable(OpCode::p2p);
  check_batch(batch, size(), Dispatch::options().num_channels);
  return execution_->batch_p2p(batch, std::move(options));
}

OperationPtr Communicator::exchange(OpCode op, const PreparedExchangePtr& prepared,
                                    std::span<const TensorRef> inputs,
                                    std::span<const TensorRef> outputs, CallOptions options,
                                    const Scope& scope, const OperationPtr& after) {
  check_usable(op);
  const auto lowered =
      prepared->lowered_for(rank(), size(), inputs, outputs, execution_->stages_all());
  if (!scope.members.empty() || scope.channel != kCollectiveChannel)
    check_peers(*lowered, peers_in(scope));
  if (after && scope.channel == kCollectiveChannel)
    throw std::invalid_argument("what follows another operation needs a channel");
  return execution_->exchange({op, prepared, lowered, inputs, outputs, scope, after},
                              std::move(options));
}

OperationPtr Communicator::broadcast(const TensorRef& tensor, int source, CallOptions options) {
  check_usable(OpCode::broadcast);
  check_peer(source, size(), "source rank");
  return execution_->broadcast(tensor, source, std::move(options));
}

OperationPtr Communicator::reduce(const ReduceCall& call, CallOptions options) {
  check_usable(call.op);
  check_reduce(call, rank(), size());
  return execution_->reduce(call, std::move(options));
}

OperationPtr Communicator::barrier(bool is_async) {
  check_usable(OpCode::barrier);
  return execution_->barrier(is_async);
}

OperationPtr Communicator::refuse(OpCode op, const std::string& reason, const Scope& scope) {
  check_usable(op);
  peers_in(scope);  // throws if it is not possible
  return execution_->refuse(op, reason, scope);
}

void Communicator::connect(std::span<const int> peers,
                           const std::optional<std::vector<int>>& channels,
                           std::optional<Direction> direction) {
  check_process();
  if (closed() || failure()) return;
  for (const int peer : peers)
    if (peer != rank()) transport().connect(peer);
  execution_->connect(peers, channels, direction);
}

void Communicator::connect(const Scope& scope) {
  check_process();
  const std::vector<int> peers = peers_in(scope);
  if (closed() || failure()) return;
  for (const int peer : peers) transport().connect(peer);
  execution_->connect(scope);
}

void Communicator::follow(Operation& operation, const Interrupted& interrupted) {
  check_process();
  if (!execution_->follow(operation)) wait(operation, Deadline::max(), interrupted);
}

bool Communicator::is_completed(Operation& operation) {
  return is_in_fork() ? operation.done() : execution_->poll(operation);
}

}  // namespace pipecomm
