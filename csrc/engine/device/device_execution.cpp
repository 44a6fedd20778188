#include "engine/device/device_execution.h"

#include <bit>

#include "engine/communicator.h"
#include "engine/device/packed_sends.h"
#include "engine/whole_copies.h"
#include "plan/signature.h"
#include "transport/group_tree.h"

namespace pipecomm {

DeviceExecution::DeviceExecution(Dispatch& dispatch, const DeviceOptions& options,
                                 std::shared_ptr<DeviceRuntime> runtime, const NcclApi& api)
    : dispatch_(dispatch),
      options_(options),
      timeout_(dispatch.options().timeout),
      runtime_(std::move(runtime)),
      checks_(dispatch, options.check),
      nccl_(size() == 1 ? nullptr
                        : std::make_shared<NcclTransport>(api, runtime_, rank(), size(),
                                                          options_.max_ops_per_group)),
      links_(std::make_shared<Links>(
          rank(), size(), options_.host, runtime_, nccl_, options_.nccl,
          [this](int peer, const ControlMessage& message) { send(dispatch_, peer, message); },
          dispatch.connection_events())),
      in_flight_(std::make_shared<InFlight>(runtime_, dispatch)),
      replays_(runtime_, timeout_) {}

std::unique_ptr<Communicator> make_device_communicator(
    CommunicatorOptions options, const DeviceOptions& device_options,
    const std::shared_ptr<DeviceRuntime>& runtime, const NcclApi& api,
    const Dispatch::MakeTransport& make_transport) {
  return std::make_unique<Communicator>(options, make_transport, [&](Dispatch& dispatch) {
    return std::make_unique<DeviceExecution>(dispatch, device_options, runtime, api);
  });
}

void DeviceExecution::start() {
  in_flight_->start(rank());
  std::lock_guard lock(tick_mutex_);
  is_looking_ = true;
}

// The capture that the call is part of, or 0. The streams of `lanes` will wait for the caller's
// stream; a stream that is part of a capture cannot wait for work outside of it, and the attempt
// would invalidate the capture.
uint64_t DeviceExecution::check_captures(OpCode op, std::span<const LaneKey> lanes) const {
  const uint64_t capture = runtime_->capture_of(runtime_->current_stream());
  if (capture == kBrokenCapture)
    throw std::invalid_argument(
        std::string(op_name(op)) +
        " inside a CUDA graph capture that an earlier error has broken; end "
        "it, and capture again");
  if (capture != 0 && !options_.capture_problem.empty())
    throw std::invalid_argument(std::string(op_name(op)) +
                                " inside a CUDA graph capture: " + options_.capture_problem);
  for (const LaneKey& key : lanes) {
    const StreamHandle stream = links_->stream_of(key);
    const uint64_t other = stream ? runtime_->capture_of(stream) : 0;
    if (other == 0 || other == capture) continue;
    const bool is_collective = key.channel == kCollectiveChannel;
    const std::string order = is_collective ? "the collectives take"
                                            : "channel " + std::to_string(key.channel) + " takes";
    throw std::invalid_argument(
        std::string(op_name(op)) + " beside a CUDA graph capture, which " + order +
        " part in until it ends; call it inside of the capture or after its end" +
        (is_collective ? "" : ", or use another channel"));
  }
  return capture;
}

DeviceOperationPtr DeviceExecution::make_operation(OpCode op, bool is_async, uint64_t capture) {
  auto operation = std::make_shared<DeviceOperation>(op, dispatch_.deadline_from_now(),
                                                     runtime_->current_stream(), is_async);
  operation->capture = capture;
  dispatch_.number(*operation);
  return operation;
}

// Begins the operation's part on a stream: after what the caller has enqueued (`start`; null: the
// stream is the caller's) and after the latest operation of the lane, since NCCL runs those of one
// communicator one by one. Work before a capture is not part of the graph; the user must order
// replays, as for any graph.
void DeviceExecution::enter(DeviceOperation& operation, const Lane& lane, StreamHandle stream,
                            const EventPtr& start) {
  if (start) runtime_->wait(stream, start);
  const Lane::Latest& latest = operation.is_captured() ? lane.latest_in_capture : lane.latest;
  if (latest.end && latest.stream != stream && latest.capture == operation.capture)
    runtime_->wait(stream, latest.end);
  replays_.begin_part(operation, stream);
}

void DeviceExecution::leave(DeviceOperation& operation, Lane& lane, StreamHandle stream) {
  replays_.end_part(operation, stream);
  const EventPtr end = runtime_->record(stream);
  (operation.is_captured() ? lane.latest_in_capture : lane.latest) = {stream, end,
                                                                      operation.capture};
  if (!operation.is_async && stream != operation.caller) runtime_->wait(operation.caller, end);
  operation.ends.push_back({stream, end});
}

void DeviceExecution::publish(const DeviceOperationPtr& operation) {
  const bool has_work = !operation->ends.empty();
  if (operation->is_captured()) {
    operation->write_down_captured();  // now, since no thread can wait for its replays
    replays_.add(*operation);
    if (operation->is_async && has_work) in_flight_->add(operation);
  } else if (has_work) {
    in_flight_->add(operation);
  } else {
    operation->end();
  }
}

// The deadline also ends an enqueuing call that waits in NCCL for other ranks. An error while work is
// being enqueued leaves peers waiting for the rest of it, so all ranks fail. The enqueued part may
// run until NCCL is aborted; its tensors are kept until then.
template <class Launch>
void DeviceExecution::launch(const DeviceOperationPtr& operation, Launch&& body) {
  if (!operation->is_captured()) dispatch_.note_in_flight(operation);
  try {
    body();
  } catch (const PipeCommException&) {
    if (!operation->is_captured()) in_flight_->add(operation);
    throw;
  } catch (const std::exception& error) {
    fail_enqueue(operation->op(), error);
    if (!operation->is_captured()) in_flight_->add(operation);
    throw_failure(dispatch_);
  }
}

// At its first reduction of a kind NCCL waits for all ranks while this rank's locks are held. Another
// rank may need a call of another thread of this rank before it comes, so all come before that. The
// call is announced already: if it fails, so do all ranks.
void DeviceExecution::meet_for_first(OpCode op, const Interrupted& interrupted) {
  const OperationPtr meeting = dispatch_.post_barrier(true, op);
  try {
    dispatch_.wait(*meeting, Deadline::max(), interrupted);
  } catch (const PipeCommException&) {
    throw;
  } catch (...) {
    dispatch_.abort(std::string(op_name(op)) + " was interrupted while it waited for other ranks");
    throw;
  }
}

NcclTransport::KeepWaiting DeviceExecution::keep_waiting(Deadline deadline) const {
  return [this, deadline] {
    if (dispatch_.failure()) throw_failure(dispatch_);
    if (Clock::now() >= deadline)
      throw NcclError(NcclResult::in_progress, "NCCL did not take it before the deadline");
  };
}

OperationPtr DeviceExecution::batch_p2p(std::span<const PointToPoint> batch, CallOptions options) {
  const bool is_async = options.is_async;
  in_flight_->sweep();
  PackedSends sends(batch);
  const auto own = pair_own_messages(sends.batch(), rank());
  std::vector<LaneBatch> parts = LaneBatch::split(sends.batch(), own, rank());
  std::vector<LaneKey> links;
  // The first lane of a synchronous batch runs on the caller's stream, the others on their own.
  std::vector<LaneKey> forked;
  for (const LaneBatch& part : parts) {
    if (part.key().is_one_way) links.push_back(part.key());
    if (is_async || &part != &parts.front()) forked.push_back(part.key());
  }
  require_links(OpCode::p2p, links, options.interrupted);

  const auto lock = dispatch_.lock_posts(OpCode::p2p);
  for (const PointToPoint& op : batch)
    if (op.peer != rank()) checks_.require_open(OpCode::p2p, op.direction, op.peer, op.channel);
  const uint64_t capture = check_captures(OpCode::p2p, forked);
  const DeviceOperationPtr operation = make_operation(OpCode::p2p, is_async, capture);
  checks_.post(batch, *operation, options.interrupted);
  for (const PointToPoint& op : batch)
    if (is_async && op.tensor.storage) operation->keep(op.tensor.storage);

  std::shared_ptr<std::byte> packed;
  launch(operation, [&] {
    // On the caller's stream: no lane waits for another one, and a tensor with gaps is packed
    // before the same batch receives into it.
    packed = sends.pack(*runtime_, operation->caller);
    if (is_async && packed) operation->keep(packed);
    const EventPtr start = forked.empty() ? nullptr : runtime_->record(operation->caller);
    std::vector<LaneMessages> lanes;
    std::vector<std::pair<Lane*, StreamHandle>> entered;
    for (LaneBatch& part : parts) {
      Lane& lane = links_->lane(part.key());
      const bool on_caller = !is_async && entered.empty();
      const StreamHandle stream = on_caller ? operation->caller : lane.stream;
      enter(*operation, lane, stream, on_caller ? nullptr : start);
      entered.emplace_back(&lane, stream);
      auto messages = part.begin(*runtime_, stream);
      if (!messages.empty())
        lanes.push_back({lane.comm_idx, stream, std::move(messages), operation->is_captured()});
    }
    if (!lanes.empty())
      operation->num_blocks = nccl_->send_and_receive(lanes, keep_waiting(operation->deadline()));
    for (size_t idx = 0; idx < parts.size(); ++idx) {
      const auto& [lane, stream] = entered[idx];
      parts[idx].end(*runtime_, stream);
      leave(*operation, *lane, stream);
    }
  });
  publish(operation);
  return operation;
}

// The common part of collectives: compares the call with other ranks, and lets `body(operation,
// stream)` enqueue it on the stream of its channel. `reserve(stream)` allocates the memory for that
// before other ranks learn of the call; in a capture `body` does, once the stream is part of the
// capture.
template <class Reserve, class Launch>
OperationPtr DeviceExecution::run_collective(const CollectiveCall& call,
                                             std::span<const TensorRef> inputs,
                                             std::span<const TensorRef> outputs,
                                             CallOptions options, Reserve&& reserve,
                                             Launch&& body) {
  in_flight_->sweep();
  const OpCode op = call.op;
  const Scope& scope = call.scope;
  const bool is_async = options.is_async;
  const std::vector<PeerMessages> pairs = call.messages_with(call.data_peers);
  const bool moves_data = std::ranges::any_of(
      pairs, [](const PeerMessages& pair) { return pair.sends() || pair.receives(); });
  std::vector<LaneKey> links, forked;
  if (moves_data) links.push_back(lane_of_exchange(scope));
  if (is_async) forked.push_back({scope.channel});
  if (check_captures(op, forked) == 0)
    reserve(is_async ? links_->lane({scope.channel}).stream : runtime_->current_stream());
  require_links(op, links, options.interrupted);

  auto lock = dispatch_.lock_posts(op);
  const uint64_t capture = check_captures(op, forked);  // again: a capture may have begun since
  for (const PeerMessages& pair : pairs) {
    if (pair.sends()) checks_.require_open(op, Direction::send, pair.peer, scope.channel);
    if (pair.receives()) checks_.require_open(op, Direction::recv, pair.peer, scope.channel);
  }
  checks_.post(call, capture != 0, options);
  const bool meets = call.kind != 0 && capture == 0 && kinds_.insert(call.kind).second;
  if (meets) {
    lock.unlock();
    meet_for_first(op, options.interrupted);
    lock = dispatch_.lock_posts(op);
  }
  const DeviceOperationPtr operation = make_operation(op, is_async, capture);
  for (const auto tensors : {inputs, outputs})
    for (const TensorRef& tensor : tensors)
      if (is_async && tensor.storage) operation->keep(tensor.storage);
  for (const PeerMessages& pair : pairs)
    if (pair.sends()) checks_.number(*operation, Direction::send, pair.peer, pair.send);
  for (const PeerMessages& pair : pairs)
    if (pair.receives()) checks_.number(*operation, Direction::recv, pair.peer, pair.recv);
  launch(operation, [&] {
    if (meets && check_captures(op, forked) != capture)
      throw std::invalid_argument("a CUDA graph capture of its stream has begun meanwhile");
    Lane& lane = links_->lane({scope.channel});
    const StreamHandle stream = is_async ? lane.stream : operation->caller;
    enter(*operation, lane, stream, is_async ? runtime_->record(operation->caller) : nullptr);
    body(*operation, stream);
    leave(*operation, lane, stream);
  });
  publish(operation);
  return operation;
}

OperationPtr DeviceExecution::exchange(const ExchangeCall& call, CallOptions options) {
  const auto& [op, prepared, lowered, inputs, outputs, scope, after] = call;
  const std::vector<int> data_peers = peers_of(*lowered);
  const CollectiveCall collective{op, scope, data_peers, data_peers,
                                  [op = op, channel = scope.channel, &plan = prepared->plan(),
                                   &lowered = *lowered](std::span<const int> peers) {
                                    return exchange_messages(op, channel, plan, lowered, peers);
                                  }};
  std::vector<const void*> sources;
  std::vector<void*> destinations;
  for (const TensorRef& tensor : inputs) sources.push_back(tensor.data);
  for (const TensorRef& tensor : outputs) destinations.push_back(tensor.data);
  std::shared_ptr<std::byte> send_staging, recv_staging;
  const auto reserve = [&](StreamHandle stream) {
    send_staging = runtime_->allocate(lowered->send_staging_bytes, stream);
    recv_staging = runtime_->allocate(lowered->recv_staging_bytes, stream);
  };
  DeviceOperation* earlier = nullptr;
  if (after && after->is_on_device())
    earlier = static_cast<DeviceOperation*>(after.get());
  else if (after)
    dispatch_.wait(*after, Deadline::max(), options.interrupted);
  const bool follows =
      earlier && must_follow(*earlier, runtime_->capture_of(runtime_->current_stream()), "after=");
  const auto enqueue = [&](DeviceOperation& operation, StreamHandle stream) {
    if (follows)
      for (const auto& end : earlier->ends)
        if (end.stream != stream) runtime_->wait(stream, end.event);
    if (operation.is_captured()) reserve(stream);
    const CopyBuffers buffers{sources, destinations, send_staging.get(), recv_staging.get()};
    std::vector<DeviceMessage> messages;
    const auto add = [&](Direction direction, const LoweredMessage& message,
                         const std::shared_ptr<std::byte>& staging,
                         std::span<const TensorRef> tensors) {
      std::byte* const base =
          message.is_staged() ? staging.get() : tensors[message.tensor_idx].data;
      if (message.bytes > 0)
        messages.push_back({direction, message.peer, base + message.offset_bytes, message.bytes});
    };
    for (const auto& send : lowered->sends) add(Direction::send, send, send_staging, inputs);
    for (const auto& recv : lowered->recvs) add(Direction::recv, recv, recv_staging, outputs);
    if (!lowered->pack_and_local().empty())
      runtime_->execute(lowered->pack_and_local(), buffers, lowered->scale, stream);
    if (!messages.empty()) {
      const LaneMessages lane{links_->lane(lane_of_exchange(scope)).comm_idx, stream,
                              std::move(messages), operation.is_captured()};
      operation.num_blocks =
          nccl_->send_and_receive({&lane, 1}, keep_waiting(operation.deadline()));
    }
    if (!lowered->unpack().empty()) runtime_->execute(lowered->unpack(), buffers, Scale{}, stream);
    send_staging = recv_staging = nullptr;  // while the operation still runs on the stream
  };
  const OperationPtr operation =
      run_collective(collective, inputs, outputs, std::move(options), reserve, enqueue);
  ++num_exchanges_;
  num_passes_ += lowered->copy_passes();
  return operation;
}

OperationPtr DeviceExecution::broadcast(const TensorRef& tensor, int source, CallOptions options) {
  // The arguments say what each rank sends to whom, so neighbours find all disagreements.
  const Scope everybody;
  const CollectiveCall collective{OpCode::broadcast,
                                  everybody,
                                  rank() == source ? dispatch_.peers_in({}) : std::vector{source},
                                  {},
                                  [&tensor, rank = rank(), source](std::span<const int> peers) {
                                    return broadcast_messages(tensor, rank, source, peers);
                                  }};
  const int64_t num_bytes = size() == 1 ? 0 : tensor.num_bytes();
  std::shared_ptr<std::byte> staging;
  const auto reserve = [&](StreamHandle stream) {
    if (!tensor.is_contiguous()) staging = runtime_->allocate(num_bytes, stream);
  };
  const auto enqueue = [&](DeviceOperation& operation, StreamHandle stream) {
    if (num_bytes == 0) return;
    if (operation.is_captured()) reserve(stream);
    WholeCopies gathers, scatters;
    if (staging) {
      if (rank() == source)
        gathers.add(tensor, contiguous_at(staging.get(), tensor));
      else
        scatters.add(contiguous_at(staging.get(), tensor), tensor);
    }
    if (!gathers.empty()) runtime_->execute(gathers.tasks(), gathers.buffers(), Scale{}, stream);
    const DeviceMessage message{rank() == source ? Direction::send : Direction::recv, source,
                                staging ? staging.get() : tensor.data, num_bytes};
    nccl_->broadcast({links_->lane({}).comm_idx, stream, {message}, operation.is_captured()},
                     source, keep_waiting(operation.deadline()));
    if (!scatters.empty()) runtime_->execute(scatters.tasks(), scatters.buffers(), Scale{}, stream);
    staging = nullptr;
  };
  return run_collective(collective, {&tensor, 1}, {}, std::move(options), reserve, enqueue);
}

OperationPtr DeviceExecution::reduce(const ReduceCall& call, CallOptions options) {
  const auto& [op, input, output, reduction, root] = call;
  if (!can_reduce(op, reduction, input.dtype)) return Execution::reduce(call, std::move(options));
  // NCCL does not tell which ranks it waits for. The record of the operation names all others, in a
  // large group only those with which it is compared.
  const Scope everybody;
  const std::vector<int> peers = dispatch_.are_many(size_t(size()))
                                     ? tree_neighbours(rank(), size())
                                     : dispatch_.peers_in(everybody);
  const Descriptor message = reduce_message(call);
  const bool moves_bytes = op == OpCode::all_gather;
  const NcclReduction enqueued{op,
                               input.data,
                               output.data,
                               size_t(message.num_bytes / (moves_bytes ? 1 : input.dtype.itemsize)),
                               moves_bytes ? kNcclBytes : *nccl_dtype(input.dtype),
                               moves_bytes ? 0 : *nccl_operator(reduction),
                               root};
  Signature kind(op_name(op));
  kind.add(int64_t{enqueued.dtype}).add(int64_t{enqueued.reduction});
  kind.add(int64_t(std::bit_width(uint64_t(message.num_bytes))));
  const bool connects = size() > 1 && message.num_bytes > 0;
  const CollectiveCall collective{
      op, everybody, peers, {}, same_messages(message), connects ? kind.value() : 0};
  const auto enqueue = [&](DeviceOperation& operation, StreamHandle stream) {
    if (message.num_bytes == 0) return;
    if (size() > 1) {
      const DeviceMessage sent{Direction::send, rank(), input.data, message.num_bytes};
      return nccl_->reduce({links_->lane({}).comm_idx, stream, {sent}, operation.is_captured()},
                           enqueued, keep_waiting(operation.deadline()));
    }
    if (input.data == output.data) return;
    WholeCopies copies;
    copies.add(input, contiguous_at(output.data, input));
    runtime_->execute(copies.tasks(), copies.buffers(), Scale{}, stream);
  };
  return run_collective(
      collective, {&input, 1}, {&output, 1}, std::move(options), [](StreamHandle) {}, enqueue);
}

OperationPtr DeviceExecution::barrier(bool is_async) {
  checks_.post_barrier();
  return dispatch_.post_barrier(is_async);
}

// The others get the refusal in place of this rank's part, even if they have already begun theirs.
OperationPtr DeviceExecution::refuse(OpCode op, const std::string& reason, const Scope& scope) {
  const OperationPtr nobody_waits = dispatch_.make_operation(op);
  nobody_waits->seal();
  if (size() == 1) return nobody_waits;
  const auto lock = dispatch_.lock_posts(op);
  checks_.refuse(op, reason, scope);
  return nobody_waits;
}

void DeviceExecution::on_control(int peer, std::span<const std::byte> bytes) {
  std::optional<ControlMessage> message;
  try {
    message = ControlMessage::decoded(bytes);
  } catch (const std::runtime_error&) {
  }
  if (message && (checks_.receive(peer, *message) || links_->receive(peer, *message))) return;
  fail(FailureKind::error, "rank " + std::to_string(peer) +
                               " sent an NCCL control message that this rank does not know; all "
                               "ranks need the same version of pipecomm_ext");
}

}  // namespace pipecomm
