#include "engine/host_execution.h"

#include <algorithm>

#include "copy/copy_cpu.h"
#include "message/recycled.h"

namespace pipecomm {
namespace {

StagingPool pool_for(const std::shared_ptr<DeviceRuntime>& device) {
  if (!device) return StagingPool();
  return StagingPool([device](int64_t num_bytes) { return device->allocate_host(num_bytes); });
}

// Tensors of one call often share a storage, which is kept only once.
void keep_storages(Operation& operation, std::span<const TensorRef> tensors) {
  const void* last = nullptr;
  for (const TensorRef& tensor : tensors) {
    if (tensor.storage && tensor.storage.get() != last) operation.keep(tensor.storage);
    last = tensor.storage.get();
  }
}

}  // namespace

HostExecution::HostExecution(Dispatch& dispatch)
    : dispatch_(dispatch),
      staging_(dispatch.options().device ? std::make_unique<HostStaging>(dispatch.options().device)
                                         : nullptr),
      pool_(pool_for(dispatch.options().device)),
      threads_(dispatch.options().num_threads) {}

OperationPtr HostExecution::batch_p2p(std::span<const PointToPoint> batch, CallOptions options) {
  const int rank = dispatch_.rank();
  const auto own = pair_own_messages(batch, rank);
  const OperationPtr operation = dispatch_.make_operation(OpCode::p2p);
  const auto staged = stage(*operation, batch, own);
  for (size_t idx = 0; idx < batch.size(); ++idx) {
    const PointToPoint& op = batch[idx];
    if (op.tensor.storage) operation->keep(op.tensor.storage);
    if (op.peer == rank) continue;
    operation->add_request(op.direction, op.peer,
                           dispatch_.checked(describe(OpCode::p2p, op.channel, op.tensor,
                                                      op.signature, op.tensor.num_bytes())),
                           staged ? staged->data[idx] : op.tensor.data);
  }
  dispatch_.post(operation, options.is_async);
  return operation;
}

OperationPtr HostExecution::exchange(const ExchangeCall& call, CallOptions options) {
  const OpCode op = call.op;
  const int channel = call.scope.channel;
  const OperationPtr operation = dispatch_.make_operation(op);
  const auto exchange = std::allocate_shared<HostExchange>(
      Recycled<HostExchange>(), *this, call,
      stages_all() || !dispatch_.transport().copies_on_the_way());
  keep_storages(*operation, call.inputs);
  keep_storages(*operation, call.outputs);
  operation->keep(exchange);
  const EventPtr caller = work_of_caller(op);
  const Descriptor empty =
      dispatch_.checked(empty_message(op, channel, call.prepared->plan(), call.scope.gradient_of));
  if (dispatch_.runs_in_line(channel)) {
    begin_exchange(*operation, caller, *exchange);
    Collective collective{operation, call.scope.members, empty};
    collective.messages_with = [exchange, empty](std::span<const int> peers) {
      return exchange->requests(empty, peers);
    };
    collective.data_peers = peers_of(*exchange->lowered);
    dispatch_.post_collective(std::move(collective), channel, options.is_async);
    return operation;
  }
  const auto post = [this, caller, empty, is_async = options.is_async](const OperationPtr& made,
                                                                       HostExchange& messages,
                                                                       std::span<const int> peers) {
    begin_exchange(*made, caller, messages);
    made->add_requests(messages.requests(empty, peers));
    dispatch_.post(made, is_async);
  };
  if (channel != kCollectiveChannel)
    dispatch_.post_after(channel, call.after, operation,
                         [this, post, operation, exchange, peers = dispatch_.peers_in(call.scope)] {
                           operation->restart(dispatch_.deadline_from_now());
                           post(operation, *exchange, peers);
                         });
  else if (call.scope.members.empty())
    post(operation, *exchange, dispatch_.others());
  else
    post(operation, *exchange, dispatch_.peers_in(call.scope));
  return operation;
}

// The operation keeps the exchange.
void HostExecution::begin_exchange(Operation& operation, const EventPtr& caller,
                                   HostExchange& exchange) {
  exchange.take_memory();
  before_posting(operation, caller, [&] { exchange.begin(); });
  if (exchange.stages) operation.on_success([&exchange] { exchange.end(); });
}

OperationPtr HostExecution::broadcast(const TensorRef& tensor, int source, CallOptions options) {
  const int rank = dispatch_.rank();
  const OperationPtr operation = dispatch_.make_operation(OpCode::broadcast);
  if (tensor.storage) operation->keep(tensor.storage);
  const Direction way = source == rank ? Direction::send : Direction::recv;
  const PointToPoint whole{way, -1, kCollectiveChannel, tensor, 0};
  const auto staged = stage(*operation, {&whole, 1}, {});
  std::byte* const data = staged ? staged->data[0] : tensor.data;
  const Descriptor common = dispatch_.checked(broadcast_message(tensor, source));
  const auto messages_with = [rank, source, data, common](std::span<const int> peers) {
    RequestList requests;
    for (const Direction direction : {Direction::recv, Direction::send}) {
      for (const int peer : peers) {
        Descriptor descriptor = common;
        const bool has_payload = (direction == Direction::send ? rank : peer) == source;
        if (!has_payload) descriptor.num_bytes = 0;
        requests.push_back(
            make_request(direction, peer, descriptor, descriptor.num_bytes > 0 ? data : nullptr));
      }
    }
    return requests;
  };
  if (!dispatch_.runs_in_line(kCollectiveChannel)) {
    operation->add_requests(messages_with(dispatch_.others()));
    dispatch_.post(operation, options.is_async);
    return operation;
  }
  Collective collective{operation, {}, common};
  collective.source = source;
  collective.payload = data;
  collective.messages_with = messages_with;
  dispatch_.post_collective(std::move(collective), kCollectiveChannel, options.is_async);
  return operation;
}

EventPtr HostExecution::work_of_caller(OpCode op) {
  return staging_ ? staging_->work_of_caller(op_name(op)) : nullptr;
}

void HostExecution::copy(std::span<const CopyTask> tasks, const CopyBuffers& buffers,
                         const Scale& scale) {
  if (tasks.empty()) return;
  if (staging_) return staging_->execute(tasks, buffers, scale);
  std::unique_lock lock(threads_mutex_, std::try_to_lock);
  execute_cpu(tasks, buffers, scale, lock ? &threads_ : nullptr);
}

// Staging memory for tensors with gaps or on a device, and the copies before and after. Null if all
// tensors are sent in place; messages to oneself are then copied here.
std::shared_ptr<StagedBatch> HostExecution::stage(Operation& operation,
                                                  std::span<const PointToPoint> batch,
                                                  const OwnMessages& own) {
  const bool travel_as_they_lie =
      !staging_ && std::all_of(batch.begin(), batch.end(),
                               [](const PointToPoint& op) { return op.tensor.is_contiguous(); });
  if (travel_as_they_lie) {
    for (const auto& [send, recv] : own)
      std::copy_n(send->tensor.data, send->tensor.num_bytes(), recv->tensor.data);
    return nullptr;
  }
  const EventPtr caller = work_of_caller(operation.op());
  const auto which = staging_ ? Staged::all : Staged::with_gaps;
  const auto staged =
      std::make_shared<StagedBatch>(stage_batch(batch, own, dispatch_.rank(), which, pool_));
  before_posting(operation, caller,
                 [&] { copy(staged->outgoing.tasks(), staged->outgoing.buffers(), Scale{}); });
  operation.keep(staged);
  operation.on_success([this, staged] {
    copy(staged->incoming.tasks(), staged->incoming.buffers(), Scale{});
    staged->memory.reset();
  });
  return staged;
}

// Runs the copies that precede the messages. On a device, these and the copies that follow the
// messages come after the caller's work; an error there leaves peers waiting, so all ranks fail.
void HostExecution::before_posting(const Operation& operation, const EventPtr& caller,
                                   const std::function<void()>& copies) {
  if (!staging_) return copies();
  const auto fail_with = [&](FailureKind kind, const std::string& text) {
    const std::string name = op_name(operation.op());
    dispatch_.fail(dispatch_.own_failure(kind, name + text, name));
  };
  try {
    staging_->wait(caller, [&] {
      dispatch_.check_usable(operation.op());
      if (Clock::now() >= operation.deadline())
        fail_with(
            FailureKind::timeout,
            " timed out after " + seconds_text(Clock::now() - operation.posted_at()) +
                ": the caller's CUDA stream has not reached it; the stream may be waiting for "
                "another rank itself");
    });
    copies();
  } catch (const PipeCommException&) {
    throw;
  } catch (const std::exception& error) {
    fail_with(FailureKind::error, std::string(" could not be enqueued: ") + error.what());
    dispatch_.check_usable(operation.op());
    throw;
  }
}

// ------------------------------------------------------------------------------------------------
// one exchange

HostExchange::HostExchange(HostExecution& execution, const ExchangeCall& call, bool stages_messages)
    : lowered(call.lowered), stages(stages_messages), execution_(execution) {
  for (const TensorRef& tensor : call.inputs) buffers_.inputs.push_back(tensor.data);
  for (const TensorRef& tensor : call.outputs) buffers_.outputs.push_back(tensor.data);
}

void HostExchange::take_memory() {
  if (!stages) return;
  buffers_.send_staging = execution_.pool_.acquire(lowered->send_staging_bytes);
  buffers_.recv_staging = execution_.pool_.acquire(lowered->recv_staging_bytes);
}

void HostExchange::begin() {
  execution_.copy(stages ? lowered->pack_and_local() : lowered->local(), buffers_.view(),
                  lowered->scale);
  ++execution_.num_exchanges_;
  execution_.num_passes_ += lowered->copy_passes();
}

void HostExchange::end() {
  if (stages) execution_.copy(lowered->unpack(), buffers_.view(), Scale{});
  // Returned to the pool before waiters run, so that their next exchange can use it.
  buffers_.send_staging.reset();
  buffers_.recv_staging.reset();
}

RequestPtr HostExchange::request(Direction direction, int peer, const Descriptor& descriptor,
                                 const LoweredMessage* message) {
  const bool sends = direction == Direction::send;
  const void* data = nullptr;
  std::shared_ptr<const MessageCopy> on_the_way;
  if (message && !message->is_staged())
    data = sends ? buffers_.inputs[message->tensor_idx] : buffers_.outputs[message->tensor_idx];
  else if (message && stages)
    data = (sends ? buffers_.send_staging : buffers_.recv_staging).get();
  else if (message)
    on_the_way = std::allocate_shared<MessageCopy>(
        Recycled<MessageCopy>(), MessageCopy{lowered, message, {shared_from_this(), &buffers_}});
  auto* const bytes = static_cast<std::byte*>(const_cast<void*>(data));
  RequestPtr made =
      make_request(direction, peer, descriptor, bytes ? bytes + message->offset_bytes : nullptr);
  made->copy = std::move(on_the_way);
  return made;
}

RequestList HostExchange::requests(const Descriptor& empty, std::span<const int> peers) {
  RequestList requests;
  for (const Direction direction : {Direction::recv, Direction::send}) {
    const bool sends = direction == Direction::send;
    MessagesByPeer messages(sends ? lowered->sends : lowered->recvs);
    for (const int peer : peers) {
      const LoweredMessage* const message = messages.with(peer);
      requests.push_back(request(direction, peer,
                                 execution_.dispatch_.checked(described(empty, message)), message));
    }
  }
  return requests;
}

}  // namespace pipecomm
