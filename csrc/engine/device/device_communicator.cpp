#include "engine/device/device_communicator.h"

#include <future>

#include "engine/device/packed_sends.h"
#include "engine/whole_copies.h"
#include "message/start_thread.h"

namespace pipecomm {
namespace {

constexpr auto kConnectPoll = std::chrono::milliseconds(1);

}  // namespace

DeviceCommunicator::DeviceCommunicator(const DeviceOptions& options,
                                       std::shared_ptr<DeviceRuntime> runtime, const NcclApi& api,
                                       std::span<const NcclUniqueId> nccl_ids,
                                       const Communicator::MakeTransport& make_control,
                                       const Interrupted& interrupted)
    : options_(options),
      runtime_(std::move(runtime)),
      check_(options.size, options.num_channels, options.check),
      replays_(runtime_, options.timeout),
      counts_(options.size),
      drained_(size_t(options.size)) {
  CommunicatorOptions control;
  control.rank = options_.rank;
  control.size = options_.size;
  control.num_channels = options_.num_channels;
  control.timeout = options_.timeout;
  control.on_failure = options_.on_failure;
  control.direct_limit = options_.size;  // the agreement before a collective is direct
  control.on_claim = [this](int peer, Direction direction, const Descriptor& theirs) {
    on_claim(peer, direction, theirs);
  };
  control_ = std::make_shared<Communicator>(control, make_control);
  in_flight_ = std::make_shared<InFlight>(runtime_, control_, options_.on_failure);
  for (int lane_idx = 0; lane_idx < num_lanes(options_.num_channels); ++lane_idx)
    lanes_.push_back({runtime_->new_stream(), nullptr, nullptr});
  if (size() > 1) {
    nccl_ =
        std::make_shared<NcclTransport>(api, runtime_, rank(), size(), options_.max_ops_per_group);
    connect(nccl_ids, interrupted);
  }
  in_flight_->start();
  try {
    watchdog_ = start_thread([this] { watch(); }, rank());
  } catch (const PipeCommException&) {
    in_flight_->stop();
    throw;
  }
}

void DeviceCommunicator::connect(std::span<const NcclUniqueId> nccl_ids,
                                 const Interrupted& interrupted) {
  const Clock::time_point begin = Clock::now();
  std::vector<NcclLane> lanes;
  for (size_t idx = 0; idx < nccl_ids.size(); ++idx)
    lanes.push_back({nccl_ids[idx], reach_of(int(idx), options_.num_channels), lanes_[idx].stream});
  // NCCL waits for ranks that may never come, so it does on a thread that can be left behind.
  std::packaged_task<void()> task(
      [runtime = runtime_, nccl = nccl_, lanes = std::move(lanes), config = options_.nccl] {
        runtime->adopt_thread();
        nccl->connect(lanes, config);
      });
  std::future<void> connected = task.get_future();
  try {
    start_thread(std::move(task), rank()).detach();
    while (connected.wait_for(kConnectPoll) != std::future_status::ready) {
      if (control_->failure()) throw_failure();
      interrupted();
      if (options_.timeout && Clock::now() - begin > *options_.timeout)
        throw NcclError(NcclResult::in_progress,
                        "not all ranks are connected after " + seconds_text(Clock::now() - begin));
    }
    connected.get();
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

DeviceOperationPtr DeviceCommunicator::make_operation(OpCode op, bool is_async, uint64_t capture) {
  auto operation = std::make_shared<DeviceOperation>(op, control_->deadline_from_now(),
                                                     runtime_->current_stream(), is_async);
  operation->capture = capture;
  if (capture != 0) has_captured_ = true;
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
  // Work before a capture is not part of the graph; the user orders replays, as for any graph.
  if (lane.last_end && lane.last_stream != stream && !operation.is_captured())
    runtime_->wait(stream, lane.last_end);
  replays_.begin_part(operation, stream);
  return stream;
}

EventPtr DeviceCommunicator::leave(DeviceOperation& operation, int lane_idx, StreamHandle stream) {
  replays_.end_part(operation, stream);
  EventPtr end = runtime_->record(stream);
  if (!operation.is_captured()) {
    lanes_[lane_idx].last_stream = stream;
    lanes_[lane_idx].last_end = end;
  }
  if (!operation.is_async && stream != operation.caller) runtime_->wait(operation.caller, end);
  operation.ends.push_back({stream, end});
  return end;
}

void DeviceCommunicator::publish(const DeviceOperationPtr& operation) {
  if (!operation->ends.empty() && !operation->is_captured()) return in_flight_->add(operation);
  operation->done = !operation->is_captured();
  in_flight_->add_ended(*operation);  // its replays are nothing that anybody can wait for
  replays_.add(*operation);
}

// An error while work is being enqueued leaves peers waiting for the rest of it: all ranks fail. What
// has been enqueued may run until NCCL is aborted, and its tensors stay for so long.
template <class Launch>
void DeviceCommunicator::launch(const DeviceOperationPtr& operation, Launch&& body) {
  try {
    body();
  } catch (const PipeCommException&) {
    if (!operation->is_captured()) in_flight_->add(operation);
    throw;
  } catch (const std::exception& error) {
    fail_enqueue(operation->op, error);
    if (!operation->is_captured()) in_flight_->add(operation);
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
  in_flight_->sweep();
  check_batch(batch, size(), options_.num_channels);
  PackedSends sends(batch);
  const auto own = pair_own_messages(sends.batch(), rank());
  std::vector<LaneBatch> parts = LaneBatch::split(sends.batch(), own, rank());
  // A synchronous batch runs on the caller's stream, but for all lanes except the first.
  std::vector<int> forked;
  for (const LaneBatch& part : parts)
    if (is_async || &part != &parts.front()) forked.push_back(part.lane_idx());

  std::lock_guard lock(launch_mutex_);
  check_usable(OpCode::p2p);  // again, now that no other thread can close in between
  for (const PointToPoint& op : batch)
    if (op.peer != rank()) check_open(OpCode::p2p, op.direction, op.peer, op.channel);
  const uint64_t capture = check_captures(OpCode::p2p, forked);
  const DeviceOperationPtr operation = make_operation(OpCode::p2p, is_async, capture);
  check_messages(batch, *operation);
  for (const PointToPoint& op : batch)
    if (is_async && op.tensor.storage) operation->keep(op.tensor.storage);

  std::shared_ptr<std::byte> packed;
  launch(operation, [&] {
    // On the caller's stream: no lane waits for another one, and what a tensor with gaps receives in
    // the same batch comes after what it sends.
    packed = sends.pack(*runtime_, operation->caller);
    if (is_async && packed) operation->keep(packed);
    const EventPtr start = forked.empty() ? nullptr : runtime_->record(operation->caller);
    std::vector<LaneMessages> lanes;
    bool has_messages = false;
    for (LaneBatch& part : parts) {
      const bool on_caller = !is_async && lanes.empty();
      const StreamHandle stream = enter(*operation, part.lane_idx(), on_caller, start);
      has_messages |= !lanes.emplace_back(part.begin(*runtime_, stream)).messages.empty();
    }
    if (has_messages) nccl_->send_and_receive(lanes, keep_waiting(operation->deadline));
    for (size_t idx = 0; idx < parts.size(); ++idx) {
      parts[idx].end(*runtime_, lanes[idx].stream);
      leave(*operation, lanes[idx].lane_idx, lanes[idx].stream);
    }
  });
  publish(operation);
  return operation;
}

// The messages of an exchange, on `stream`, which is that of the first lane. On a channel of the
// user those to lower ranks run beside them; what comes later on `stream` waits for both.
void DeviceCommunicator::exchange_messages_on(DeviceOperation& operation, int channel,
                                              StreamHandle stream,
                                              std::span<const DeviceMessage> messages) {
  if (messages.empty()) return;
  const bool is_collective = channel == kCollectiveChannel;
  const int first_idx = is_collective ? collective_lane(options_.num_channels) : 2 * channel;
  std::vector<LaneMessages> lanes{{first_idx, stream, {}}};
  for (const DeviceMessage& message : messages) {
    const int lane_idx =
        is_collective ? first_idx : lane_of(channel, message.direction, rank(), message.peer);
    if (lane_idx != first_idx && lanes.size() == 1)
      lanes.push_back({lane_idx, enter(operation, lane_idx, false, runtime_->record(stream)), {}});
    (lane_idx == first_idx ? lanes.front() : lanes.back()).messages.push_back(message);
  }
  nccl_->send_and_receive(lanes, keep_waiting(operation.deadline));
  if (lanes.size() == 2)
    runtime_->wait(stream, leave(operation, lanes[1].lane_idx, lanes[1].stream));
}

DeviceOperationPtr DeviceCommunicator::exchange(OpCode op, PreparedExchangePtr prepared,
                                                std::span<const TensorRef> inputs,
                                                std::span<const TensorRef> outputs, bool is_async,
                                                const Interrupted& interrupted,
                                                const Scope& scope) {
  check_usable(op);
  in_flight_->sweep();
  const auto lowered = prepared->lowered_for(rank(), size(), inputs, outputs);
  const std::vector<int> peers = control_->peers_in(scope);
  check_peers(*lowered, peers);
  const std::vector<PeerMessages> pairs =
      exchange_messages(op, scope.channel, prepared->plan(), *lowered, peers);
  const std::vector<int> forked = forked_lanes(scope.channel, pairs, is_async);
  std::lock_guard collective_lock(collective_mutex_);
  check_captures(op, forked);
  agree(op, pairs, scope, interrupted);

  std::lock_guard lock(launch_mutex_);
  check_usable(op);
  const uint64_t capture = check_captures(op, forked);  // again: a capture may have come since
  for (const PeerMessages& pair : pairs) {
    if (pair.lowered_send) check_open(op, Direction::send, pair.peer, scope.channel);
    if (pair.lowered_recv) check_open(op, Direction::recv, pair.peer, scope.channel);
  }
  const DeviceOperationPtr operation = make_operation(op, is_async, capture);
  std::vector<const void*> sources;
  std::vector<void*> destinations;
  for (const TensorRef& tensor : inputs) sources.push_back(tensor.data);
  for (const TensorRef& tensor : outputs) destinations.push_back(tensor.data);
  for (const auto tensors : {inputs, outputs})
    for (const TensorRef& tensor : tensors)
      if (is_async && tensor.storage) operation->keep(tensor.storage);

  launch(operation, [&] {
    const bool is_collective = scope.channel == kCollectiveChannel;
    const int lane_idx = is_collective ? collective_lane(options_.num_channels) : 2 * scope.channel;
    const StreamHandle stream = enter(*operation, lane_idx, !is_async,
                                      is_async ? runtime_->record(operation->caller) : nullptr);
    const auto send_staging = runtime_->allocate(lowered->send_staging_bytes, stream);
    const auto recv_staging = runtime_->allocate(lowered->recv_staging_bytes, stream);
    const CopyBuffers buffers{sources, destinations, send_staging.get(), recv_staging.get()};
    std::vector<DeviceMessage> messages;
    auto add = [&](Direction direction, int peer, const Descriptor& descriptor,
                   const LoweredMessage* message) {
      if (!message) return;
      const bool sends = direction == Direction::send;
      std::byte* base = message->is_staged() ? (sends ? send_staging : recv_staging).get()
                                             : (sends ? inputs : outputs)[message->tensor_idx].data;
      messages.push_back({direction, peer, base + message->offset_bytes, message->bytes});
      note_message(*operation, direction, peer, descriptor);
    };
    for (const PeerMessages& pair : pairs)
      add(Direction::send, pair.peer, pair.send, pair.lowered_send);
    for (const PeerMessages& pair : pairs)
      add(Direction::recv, pair.peer, pair.recv, pair.lowered_recv);
    if (!lowered->pack_and_local().empty())
      runtime_->execute(lowered->pack_and_local(), buffers, lowered->scale, stream);
    exchange_messages_on(*operation, scope.channel, stream, messages);
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
  in_flight_->sweep();
  const std::vector<PeerMessages> pairs =
      broadcast_messages(tensor, rank(), source, control_->peers_in({}));
  const std::vector<int> forked = forked_lanes(kCollectiveChannel, pairs, is_async);
  std::lock_guard collective_lock(collective_mutex_);
  check_captures(OpCode::broadcast, forked);
  agree(OpCode::broadcast, pairs, {}, interrupted);

  std::lock_guard lock(launch_mutex_);
  check_usable(OpCode::broadcast);
  const uint64_t capture = check_captures(OpCode::broadcast, forked);
  for (const PeerMessages& pair : pairs) {
    if (rank() == source)
      check_open(OpCode::broadcast, Direction::send, pair.peer, pair.send.channel);
    if (pair.peer == source)
      check_open(OpCode::broadcast, Direction::recv, source, pair.recv.channel);
  }
  const DeviceOperationPtr operation = make_operation(OpCode::broadcast, is_async, capture);
  if (is_async && tensor.storage) operation->keep(tensor.storage);
  for (const PeerMessages& pair : pairs) {
    if (rank() == source) note_message(*operation, Direction::send, pair.peer, pair.send);
    if (pair.peer == source) note_message(*operation, Direction::recv, pair.peer, pair.recv);
  }
  const int64_t num_bytes = tensor.num_bytes();
  if (size() > 1 && num_bytes > 0) {
    launch(operation, [&] {
      const int lane_idx = collective_lane(options_.num_channels);
      const StreamHandle stream = enter(*operation, lane_idx, !is_async,
                                        is_async ? runtime_->record(operation->caller) : nullptr);
      std::shared_ptr<std::byte> staging;
      WholeCopies gathers, scatters;
      if (!tensor.is_contiguous()) {
        staging = runtime_->allocate(num_bytes, stream);
        if (rank() == source)
          gathers.add(tensor, staging.get());
        else
          scatters.add(staging.get(), tensor);
      }
      if (!gathers.empty()) runtime_->execute(gathers.tasks(), gathers.buffers(), Scale{}, stream);
      nccl_->broadcast(lane_idx, staging ? staging.get() : tensor.data, num_bytes, source, stream,
                       keep_waiting(operation->deadline));
      if (!scatters.empty())
        runtime_->execute(scatters.tasks(), scatters.buffers(), Scale{}, stream);
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
