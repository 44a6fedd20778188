#include "engine/device_communicator.h"

#include <algorithm>

#include "plan/signature.h"

namespace pipecomm {
namespace {

bool is_contiguous(const TensorRef& tensor) {
  int64_t pitch = 1;
  for (size_t dim = tensor.shape.size(); dim-- > 0;) {
    if (tensor.shape[dim] != 1 && tensor.strides[dim] != pitch) return false;
    pitch *= tensor.shape[dim];
  }
  return true;
}

// The copies from contiguous memory to the elements of `tensor`.
LoweredExchange scatter_copies(const TensorRef& tensor) {
  const TensorSpec spec{tensor.shape, tensor.dtype};
  const Transfer whole{0, {Box{0, Dims(tensor.shape.size(), 0), tensor.shape}}};
  ExchangePlan plan;
  plan.op = "copy";
  plan.inputs = plan.outputs = {spec};
  plan.sends = plan.recvs = {whole};
  return lower(plan, {Layout::contiguous(spec)},
               {Layout{tensor.shape, tensor.strides, tensor.dtype.itemsize}});
}

}  // namespace

DeviceCommunicator::DeviceCommunicator(const DeviceOptions& options,
                                       std::shared_ptr<DeviceRuntime> runtime, const NcclApi& api,
                                       std::span<const NcclUniqueId> nccl_ids,
                                       const Communicator::MakeTransport& make_control,
                                       const Interrupted& interrupted)
    : options_(options),
      runtime_(std::move(runtime)),
      check_(options.size, options.num_channels, options.check),
      flight_record_(options.on_failure),
      num_noted_(size_t(options.size) * 2 * kNumChannels) {
  CommunicatorOptions control;
  control.rank = options_.rank;
  control.size = options_.size;
  control.num_channels = options_.num_channels;
  control.timeout = options_.timeout;
  control.on_failure = options_.on_failure;
  control.on_claim = [this](int peer, Direction direction, const Descriptor& theirs) {
    if (const auto mismatch = check_.heard(peer, direction, theirs)) fail_mismatch(*mismatch);
  };
  control_ = std::make_shared<Communicator>(control, make_control);
  if (size() > 1) {
    nccl_ =
        std::make_shared<NcclTransport>(api, runtime_, rank(), size(), options_.max_ops_per_group);
    connect(nccl_ids, interrupted);
  }
  for (int lane_idx = 0; lane_idx < num_nccl_ids(options_.num_channels); ++lane_idx)
    lanes_.push_back({runtime_->new_stream(), nullptr, nullptr});
  watchdog_ = std::thread([this] { watch(); });
}

void DeviceCommunicator::connect(std::span<const NcclUniqueId> nccl_ids,
                                 const Interrupted& interrupted) {
  const Clock::time_point begin = Clock::now();
  try {
    nccl_->connect(nccl_ids, options_.nccl, [&] {
      if (control_->failure()) throw_failure();
      interrupted();
      if (options_.timeout && Clock::now() - begin > *options_.timeout)
        throw NcclError(NcclResult::in_progress,
                        "not all ranks are connected after " + seconds_text(Clock::now() - begin));
    });
  } catch (const std::exception& error) {
    const bool is_late = options_.timeout && Clock::now() - begin > *options_.timeout;
    control_->fail({.kind = is_late ? FailureKind::timeout : FailureKind::error,
                    .message = std::string("connecting NCCL failed: ") + error.what() +
                               "; NCCL_DEBUG=INFO shows what it tried",
                    .op = "Communicator",
                    .rank = rank(),
                    .origin_rank = rank()});
    abort_nccl();
    if (dynamic_cast<const NcclError*>(&error)) throw_failure();
    throw;
  }
}

DeviceCommunicator::~DeviceCommunicator() {
  if (closed_) return;
  // Nobody can wait for operations any more; peers learn it from the goodbye of the control plane.
  closing_ = true;
  {
    std::lock_guard lock(mutex_);
    stop_watching_ = true;
  }
  stop_watch_.notify_all();
  if (watchdog_.joinable()) watchdog_.join();
  abort_nccl();
}

// ------------------------------------------------------------------------------------------------
// checks

void DeviceCommunicator::throw_failure() const { throw PipeCommException(control_->failure()); }

void DeviceCommunicator::check_usable(OpCode op) const {
  if (control_->failure()) throw_failure();
  if (!closing_) return;
  Failure closed{.kind = FailureKind::aborted,
                 .message = std::string(op_name(op)) +
                            " on a closed communicator; create a new Communicator to go on",
                 .op = op_name(op),
                 .rank = rank(),
                 .origin_rank = rank()};
  throw PipeCommException(std::make_shared<Failure>(std::move(closed)));
}

// Claims what is new, or refuses it inside a capture.
void DeviceCommunicator::check_messages(std::span<const PointToPoint> batch,
                                        DeviceOperation& operation) {
  for (const PointToPoint& op : batch) {
    if (op.peer == rank()) continue;
    Descriptor descriptor =
        describe(OpCode::p2p, op.channel, op.tensor, op.signature, op.tensor.num_bytes());
    if (operation.is_captured) {
      if (!check_.is_known(op.peer, op.direction, descriptor))
        throw std::invalid_argument(
            "first " + std::string(op.direction == Direction::send ? "send to" : "recv from") +
            " rank " + std::to_string(op.peer) + " of " + descriptor.text() +
            " inside a CUDA graph capture, where the two ranks cannot compare it; run the batch "
            "once before capturing, or use check=\"off\"");
      note_message(operation, op.direction, op.peer, descriptor);
      continue;
    }
    const MessageCheck::Posted posted = check_.posted(op.peer, op.direction, descriptor);
    note_message(operation, op.direction, op.peer, descriptor);
    if (posted.claim) control_->claim(op.peer, op.direction, descriptor);
    if (posted.mismatch) {
      fail_mismatch(*posted.mismatch);
      throw_failure();
    }
  }
}

// Numbers a message in the order of its (peer, direction, channel), like the host transports do.
void DeviceCommunicator::note_message(DeviceOperation& operation, Direction direction, int peer,
                                      Descriptor descriptor) {
  const size_t lane_idx =
      (size_t(peer) * 2 + size_t(direction)) * kNumChannels + descriptor.channel;
  descriptor.seq = num_noted_[lane_idx]++;
  operation.add_message(direction, peer, descriptor);
}

void DeviceCommunicator::agree(OpCode op, const TensorRef& shown, uint64_t signature,
                               const Interrupted& interrupted, const Scope& scope) {
  if (size() == 1 || options_.check == Check::off) return;
  const auto key = std::pair(op, signature);
  const bool is_first = !agreed_.contains(key);
  if (!is_first && options_.check == Check::first_use) return;
  if (runtime_->is_capturing(runtime_->current_stream())) {
    if (!is_first) return;
    throw std::invalid_argument(std::string("first ") + op_name(op) +
                                " with these arguments inside a CUDA graph capture, where the "
                                "ranks cannot compare them; run it once before capturing");
  }
  const OperationPtr agreement = control_->agree(op, shown, signature, true, scope);
  if (is_first && scope.channel == kCollectiveChannel) {
    control_->wait(*agreement, Deadline::max(), interrupted);
    agreed_.insert(key);
  } else {
    agreed_.insert(key);
    std::lock_guard lock(mutex_);
    pending_.push_back({agreement, std::nullopt, Clock::now()});
  }
}

void DeviceCommunicator::refuse(OpCode op, const std::string& reason, const Scope& scope) {
  check_usable(op);
  if (size() == 1) return;
  Failure failure{.kind = FailureKind::mismatch,
                  .message = std::string(op_name(op)) + " was refused by rank " +
                             std::to_string(rank()) + ": " + reason +
                             "; the other ranks had already started it, which cannot be undone",
                  .op = op_name(op),
                  .rank = rank(),
                  .origin_rank = rank()};
  if (options_.check == Check::off) {
    control_->fail(std::move(failure));
    return;
  }
  std::lock_guard collective_lock(collective_mutex_);
  const OperationPtr refusal = control_->refuse(op, reason, scope);
  std::lock_guard lock(mutex_);
  pending_.push_back({refusal, std::move(failure), Clock::now()});
}

// ------------------------------------------------------------------------------------------------
// operations

DeviceOperationPtr DeviceCommunicator::make_operation(OpCode op, bool is_async) {
  const Deadline deadline =
      options_.timeout
          ? Clock::now() + std::chrono::duration_cast<Clock::duration>(*options_.timeout)
          : Deadline::max();
  const StreamHandle caller = runtime_->current_stream();
  auto operation = std::make_shared<DeviceOperation>(op, deadline, caller, is_async);
  operation->is_captured = runtime_->is_capturing(caller);
  operation->number = num_launched_++;
  return operation;
}

// The stream for the operation's work on a lane, ordered after what the caller has enqueued and
// after the lane's latest operation (NCCL runs the operations of one communicator one by one).
StreamHandle DeviceCommunicator::enter(DeviceOperation& operation, int lane_idx, bool on_caller,
                                       const EventPtr& start) {
  const Lane& lane = lanes_[lane_idx];
  const StreamHandle stream = on_caller ? operation.caller : lane.stream;
  if (stream != operation.caller) runtime_->wait(stream, start);
  // Work before a capture is no part of the graph; the user orders replays, as for any graph.
  if (lane.last_end && lane.last_stream != stream && !operation.is_captured)
    runtime_->wait(stream, lane.last_end);
  return stream;
}

void DeviceCommunicator::leave(DeviceOperation& operation, int lane_idx, StreamHandle stream) {
  EventPtr end = runtime_->record(stream);
  if (!operation.is_captured) {
    lanes_[lane_idx].last_stream = stream;
    lanes_[lane_idx].last_end = end;
  }
  if (!operation.is_async && stream != operation.caller) runtime_->wait(operation.caller, end);
  operation.ends.push_back(std::move(end));
}

void DeviceCommunicator::publish(const DeviceOperationPtr& operation) {
  if (operation->ends.empty()) return note_done(*operation);
  if (operation->is_captured) return write_down(*operation, nullptr);  // nobody sees its replays
  std::lock_guard lock(mutex_);
  in_flight_.push_back(operation);
}

// Whatever goes wrong while work is being enqueued leaves peers waiting for the rest of it.
template <class Launch>
void DeviceCommunicator::launch(DeviceOperation& operation, Launch&& body) {
  try {
    body();
  } catch (const PipeCommException&) {
    throw;
  } catch (const std::exception& error) {
    control_->fail(
        {.message = std::string(op_name(operation.op)) + " could not be enqueued: " + error.what(),
         .op = op_name(operation.op),
         .rank = rank(),
         .origin_rank = rank()});
    throw_failure();
  }
}

NcclTransport::KeepWaiting DeviceCommunicator::keep_waiting(Deadline deadline) const {
  return [this, deadline] {
    if (control_->failure()) throw_failure();
    if (Clock::now() >= deadline)
      throw NcclError(NcclResult::in_progress, "NCCL did not take it before the deadline");
  };
}

DeviceOperationPtr DeviceCommunicator::batch_p2p(std::span<const PointToPoint> batch,
                                                 bool is_async) {
  check_usable(OpCode::p2p);
  sweep();
  std::vector<PointToPoint> dense(batch.begin(), batch.end());  // for the check of shared memory
  for (PointToPoint& op : dense)
    if (!is_contiguous(op.tensor)) op.tensor.shape = {0};
  check_batch(dense, size(), options_.num_channels);
  const auto own = pair_own_messages(batch, rank());

  std::lock_guard lock(launch_mutex_);
  check_usable(OpCode::p2p);  // again, now that nobody can close in between
  const DeviceOperationPtr operation = make_operation(OpCode::p2p, is_async);
  check_messages(batch, *operation);
  std::vector<std::vector<const PointToPoint*>> by_channel(options_.num_channels);
  for (const PointToPoint& op : batch) {
    by_channel[op.channel].push_back(&op);
    if (is_async && op.tensor.storage) operation->keep(op.tensor.storage);
  }
  const auto num_used = std::count_if(by_channel.begin(), by_channel.end(),
                                      [](const auto& ops) { return !ops.empty(); });
  const bool on_caller = !is_async && num_used == 1;

  launch(*operation, [&] {
    const EventPtr start =
        on_caller || num_used == 0 ? nullptr : runtime_->record(operation->caller);
    for (int channel = 0; channel < options_.num_channels; ++channel) {
      if (by_channel[channel].empty()) continue;
      const StreamHandle stream = enter(*operation, channel, on_caller, start);
      struct Scatter {
        const TensorRef* tensor;
        std::shared_ptr<std::byte> from;
      };
      std::vector<Scatter> scatters;
      std::vector<DeviceMessage> messages;
      for (const PointToPoint* op : by_channel[channel]) {
        if (op->peer == rank()) continue;
        const int64_t num_bytes = op->tensor.num_bytes();
        std::byte* data = op->tensor.data;
        if (num_bytes > 0 && op->direction == Direction::recv && !is_contiguous(op->tensor)) {
          scatters.push_back({&op->tensor, runtime_->allocate(num_bytes, stream)});
          data = scatters.back().from.get();
        }
        messages.push_back({op->direction, op->peer, data, num_bytes});
      }
      auto scatter = [&](const std::byte* from, const TensorRef& tensor) {
        const void* const source = from;
        void* const destination = tensor.data;
        runtime_->execute(scatter_copies(tensor).local(),
                          {{&source, 1}, {&destination, 1}, nullptr, nullptr}, Scale{}, stream);
      };
      for (const auto& [send, recv] : own) {
        if (send->channel != channel || send->tensor.num_bytes() == 0) continue;
        if (is_contiguous(recv->tensor))
          runtime_->copy(recv->tensor.data, send->tensor.data, send->tensor.num_bytes(), stream);
        else
          scatter(send->tensor.data, recv->tensor);
      }
      if (!messages.empty())
        nccl_->exchange(channel, messages, stream, keep_waiting(operation->deadline));
      for (const auto& [tensor, from] : scatters) scatter(from.get(), *tensor);
      leave(*operation, channel, stream);
    }
  });
  publish(operation);
  return operation;
}

DeviceOperationPtr DeviceCommunicator::exchange(OpCode op, PreparedExchangePtr prepared,
                                                std::span<const TensorRef> inputs,
                                                std::span<const TensorRef> outputs, bool is_async,
                                                const Interrupted& interrupted,
                                                const Scope& scope) {
  check_usable(op);
  sweep();
  const auto lowered = prepared->lowered_for(rank(), size(), inputs, outputs);
  const TensorRef nothing;
  const TensorRef& shown = !inputs.empty() ? inputs[0] : !outputs.empty() ? outputs[0] : nothing;
  std::lock_guard collective_lock(collective_mutex_);
  agree(op, shown, prepared->plan().signature, interrupted, scope);

  std::lock_guard lock(launch_mutex_);
  check_usable(op);
  const DeviceOperationPtr operation = make_operation(op, is_async);
  std::vector<const void*> sources;
  std::vector<void*> destinations;
  for (const TensorRef& tensor : inputs) sources.push_back(tensor.data);
  for (const TensorRef& tensor : outputs) destinations.push_back(tensor.data);
  for (const auto tensors : {inputs, outputs})
    for (const TensorRef& tensor : tensors)
      if (is_async && tensor.storage) operation->keep(tensor.storage);

  launch(*operation, [&] {
    const bool is_collective = scope.channel == kCollectiveChannel;
    const int lane_idx = is_collective ? options_.num_channels : scope.channel;
    const StreamHandle stream = enter(*operation, lane_idx, !is_async,
                                      is_async ? runtime_->record(operation->caller) : nullptr);
    const auto send_staging = runtime_->allocate(lowered->send_staging_bytes, stream);
    const auto recv_staging = runtime_->allocate(lowered->recv_staging_bytes, stream);
    const CopyBuffers buffers{sources, destinations, send_staging.get(), recv_staging.get()};
    std::vector<DeviceMessage> messages;
    auto add = [&](Direction direction, const std::vector<LoweredMessage>& lowered_messages) {
      const bool sends = direction == Direction::send;
      const auto tensors = sends ? inputs : outputs;
      std::byte* const staging = (sends ? send_staging : recv_staging).get();
      for (const LoweredMessage& message : lowered_messages) {
        std::byte* base = message.is_staged() ? staging : tensors[message.tensor_idx].data;
        messages.push_back({direction, message.peer, base + message.offset_bytes, message.bytes});
      }
    };
    add(Direction::send, lowered->sends);
    add(Direction::recv, lowered->recvs);
    for (const DeviceMessage& message : messages)
      note_message(
          *operation, message.direction, message.peer,
          describe(op, scope.channel, shown, prepared->plan().signature, message.num_bytes));
    if (!lowered->pack_and_local().empty())
      runtime_->execute(lowered->pack_and_local(), buffers, lowered->scale, stream);
    if (!messages.empty())
      nccl_->exchange(lane_idx, messages, stream, keep_waiting(operation->deadline));
    if (!lowered->unpack().empty()) runtime_->execute(lowered->unpack(), buffers, Scale{}, stream);
    leave(*operation, lane_idx, stream);
  });
  ++num_exchanges_;
  num_passes_ += lowered->copy_passes();
  publish(operation);
  return operation;
}

DeviceOperationPtr DeviceCommunicator::broadcast(const TensorRef& tensor, int source, bool is_async,
                                                 const Interrupted& interrupted) {
  check_usable(OpCode::broadcast);
  check_peer(source, size(), "source rank");
  sweep();
  const uint64_t signature =
      Signature("broadcast").add(source).add(tensor.dtype).add(tensor.shape).value();
  std::lock_guard collective_lock(collective_mutex_);
  agree(OpCode::broadcast, tensor, signature, interrupted);

  std::lock_guard lock(launch_mutex_);
  check_usable(OpCode::broadcast);
  const DeviceOperationPtr operation = make_operation(OpCode::broadcast, is_async);
  if (is_async && tensor.storage) operation->keep(tensor.storage);
  const int64_t num_bytes = tensor.num_bytes();
  const Descriptor descriptor =
      describe(OpCode::broadcast, kCollectiveChannel, tensor, signature, num_bytes);
  for (int peer = 0; peer < size(); ++peer)
    if (peer != rank() && (rank() == source || peer == source))
      note_message(*operation, rank() == source ? Direction::send : Direction::recv, peer,
                   descriptor);
  if (size() > 1 && num_bytes > 0) {
    launch(*operation, [&] {
      const int lane_idx = options_.num_channels;
      const StreamHandle stream = enter(*operation, lane_idx, !is_async,
                                        is_async ? runtime_->record(operation->caller) : nullptr);
      std::shared_ptr<std::byte> staging;
      if (!is_contiguous(tensor)) staging = runtime_->allocate(num_bytes, stream);
      nccl_->broadcast(lane_idx, staging ? staging.get() : tensor.data, num_bytes, source, stream,
                       keep_waiting(operation->deadline));
      if (staging) {
        const void* const from = staging.get();
        void* const to = tensor.data;
        runtime_->execute(scatter_copies(tensor).local(), {{&from, 1}, {&to, 1}, nullptr, nullptr},
                          Scale{}, stream);
      }
      leave(*operation, lane_idx, stream);
    });
  }
  publish(operation);
  return operation;
}

OperationPtr DeviceCommunicator::barrier(bool is_async) {
  check_usable(OpCode::barrier);
  std::lock_guard collective_lock(collective_mutex_);
  return control_->barrier(is_async);
}

}  // namespace pipecomm
