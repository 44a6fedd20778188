#include "engine/communicator.h"

#include <unistd.h>

#include <algorithm>
#include <exception>
#include <functional>
#include <numeric>

#include "message/start_thread.h"

namespace pipecomm {
namespace {

// How long a batch whose failure is known waits for the rest of it, which mostly comes through.
constexpr auto kRestLimit = std::chrono::seconds(1);
constexpr size_t kMinSweep = 1024;

// Messages without data to and from some ranks.
auto both_ways(const Descriptor& descriptor) {
  return [descriptor](std::span<const int> peers) {
    std::vector<RequestPtr> requests;
    for (const Direction direction : {Direction::recv, Direction::send})
      for (const int peer : peers)
        requests.push_back(make_request(direction, peer, descriptor, nullptr));
    return requests;
  };
}

}  // namespace

void throw_closed(OpCode op, int rank) {
  Failure closed{.kind = FailureKind::aborted,
                 .message = std::string(op_name(op)) +
                            " on a closed communicator; create a new Communicator to go on",
                 .op = op_name(op),
                 .rank = rank,
                 .origin_rank = rank};
  throw PipeCommException(std::make_shared<Failure>(std::move(closed)));
}

Communicator::Communicator(const CommunicatorOptions& options, const MakeTransport& make_transport)
    : options_(options),
      owner_pid_(getpid()),
      flight_record_(options.on_failure),
      execution_(options.rank, options.num_threads, options.device) {
  if (options_.size < 1 || options_.rank < 0 || options_.rank >= options_.size)
    throw std::invalid_argument("rank " + std::to_string(options_.rank) + " is not in a group of " +
                                std::to_string(options_.size));
  if (options_.num_channels < 1 || options_.num_channels > kMaxUserChannels)
    throw std::invalid_argument("channels must be 1 to " + std::to_string(kMaxUserChannels) +
                                ", not " + std::to_string(options_.num_channels));
  {
    // Threads of the transport that have a failure to report wait until there is a transport to
    // abort.
    std::lock_guard lock(mutex_);
    transport_ = make_transport(*this);
    if (size() > options_.direct_limit && !transport_->prefers_direct())
      line_ = std::make_unique<CollectiveLine>(rank(), size(), options_.direct_limit, *transport_);
  }
  for (int channel = 0; channel < options_.num_channels; ++channel)
    sequencers_.push_back(std::make_unique<Sequencer>([this](Operation& operation) -> FailurePtr {
      try {
        wait(operation, Deadline::max(), nullptr);
      } catch (const PipeCommException& error) {
        return error.failure();
      }
      return nullptr;
    }));
  try {
    watchdog_ = start_thread([this] { watch(); }, options_.rank);
  } catch (const PipeCommException& error) {
    fail(*error.failure());
    throw;
  }
}

// ------------------------------------------------------------------------------------------------
// checks

FailurePtr Communicator::failure() const {
  std::lock_guard lock(mutex_);
  return failure_;
}

bool Communicator::is_in_fork() const { return getpid() != owner_pid_; }

void Communicator::check_process() const {
  if (!is_in_fork()) return;
  Failure forked{.message =
                     "this process was forked after the communicator was made, and has no "
                     "part in its connections; make a new group and Communicator here",
                 .rank = rank(),
                 .origin_rank = rank()};
  throw PipeCommException(std::make_shared<Failure>(std::move(forked)));
}

void Communicator::check_usable(OpCode op) const {
  check_process();
  std::lock_guard lock(mutex_);
  if (failure_) throw PipeCommException(failure_);
  if (!closing_) return;
  throw_closed(op, rank());
}

// ------------------------------------------------------------------------------------------------
// operations

// What peers compare of a description: with check="off" nothing but the size.
Descriptor Communicator::checked(const Descriptor& descriptor) const {
  if (options_.checks) return descriptor;
  return describe(descriptor.op, descriptor.channel, {}, 0, descriptor.num_bytes);
}

Deadline Communicator::deadline_from_now() const {
  return options_.timeout
             ? Clock::now() + std::chrono::duration_cast<Clock::duration>(*options_.timeout)
             : Deadline::max();
}

OperationPtr Communicator::make_operation(OpCode op) {
  return std::make_shared<Operation>(op, deadline_from_now());
}

std::vector<int> Communicator::peers_in(const Scope& scope) const {
  if (scope.channel != kCollectiveChannel &&
      (scope.channel < 0 || scope.channel >= options_.num_channels))
    throw std::invalid_argument("channel " + std::to_string(scope.channel) + " is not in 0.." +
                                std::to_string(options_.num_channels - 1));
  std::vector<int> peers = scope.members;
  if (peers.empty()) {
    peers.resize(size());
    std::iota(peers.begin(), peers.end(), 0);
  }
  const bool is_increasing =
      std::adjacent_find(peers.begin(), peers.end(), std::greater_equal<>()) == peers.end();
  if (!is_increasing || peers.front() < 0 || peers.back() >= size() ||
      std::erase(peers, rank()) == 0)
    throw std::invalid_argument("members must be increasing ranks of 0.." +
                                std::to_string(size() - 1) + " with this rank, " +
                                std::to_string(rank()) + ", among them");
  return peers;
}

// With `post_mutex_` held, so that no other thread closes in between.
void Communicator::post(const OperationPtr& operation, bool is_async) {
  check_usable(operation->op());
  operation->record_in(flight_record_, num_posted_++);
  std::vector<RequestPtr> requests = operation->seal();
  if (requests.empty()) return;
  if (requests.front()->descriptor.channel == kCollectiveChannel)
    operation->set_number_of_collective(++num_collectives_);
  for (const RequestPtr& request : requests) request->operation = operation;
  transport_->post(std::move(requests), is_async);
  operation->note_posted();
  note_in_flight(operation);
}

void Communicator::note_in_flight(const OperationPtr& operation) {
  std::unique_lock lock(mutex_);
  if (failure_) {  // since the check above, and without this operation
    const FailurePtr failure = failure_;
    lock.unlock();
    return operation->fail(failure_for(failure, *operation));
  }
  if (in_flight_.size() >= sweep_at_) {
    std::erase_if(in_flight_, [](const auto& weak) {
      const OperationPtr op = weak.lock();
      return !op || op->done();
    });
    sweep_at_ = std::max(kMinSweep, 2 * in_flight_.size());
  }
  in_flight_.push_back(operation);
}

// With all ranks in one order. `collective.members` are those of a scope that has been checked.
void Communicator::post_collective(Collective collective, int channel, bool is_async) {
  const OperationPtr operation = collective.operation;
  const bool is_direct = !runs_in_line(channel);
  if (is_direct)
    operation->add_requests(collective.messages_with(peers_in({collective.members, channel})));
  std::lock_guard lock(post_mutex_);
  if (is_direct) return post(operation, is_async);
  check_usable(operation->op());
  operation->record_in(flight_record_, num_posted_++);
  operation->set_number_of_collective(++num_collectives_);
  line_->submit(std::move(collective), is_async);
  note_in_flight(operation);
}

OperationPtr Communicator::batch_p2p(std::span<const PointToPoint> batch,
                                     std::function<void()> on_success, bool is_async) {
  check_usable(OpCode::p2p);
  check_batch(batch, size(), options_.num_channels);
  const auto own = pair_own_messages(batch, rank());
  const OperationPtr operation = make_operation(OpCode::p2p);
  const auto staged = stage(*operation, batch, own, std::move(on_success));
  for (size_t idx = 0; idx < batch.size(); ++idx) {
    const PointToPoint& op = batch[idx];
    if (op.tensor.storage) operation->keep(op.tensor.storage);
    if (op.peer == rank()) continue;
    operation->add_request(
        op.direction, op.peer,
        checked(describe(OpCode::p2p, op.channel, op.tensor, op.signature, op.tensor.num_bytes())),
        staged ? staged->data[idx] : op.tensor.data);
  }
  std::lock_guard lock(post_mutex_);
  post(operation, is_async);
  return operation;
}

OperationPtr Communicator::exchange(OpCode op, PreparedExchangePtr prepared,
                                    std::span<const TensorRef> inputs,
                                    std::span<const TensorRef> outputs,
                                    std::function<void()> on_success, bool is_async,
                                    const Scope& scope, const OperationPtr& after) {
  check_usable(op);
  auto lowered = prepared->lowered_for(rank(), size(), inputs, outputs, execution_.is_on_device());
  if (!scope.members.empty() || !runs_in_line(scope.channel))
    check_peers(*lowered, peers_in(scope));
  const OperationPtr operation = make_operation(op);
  const auto exchange =
      execution_.exchange(std::move(lowered), inputs, outputs, transport_->copies_on_the_way());
  for (const auto tensors : {inputs, outputs})
    for (const TensorRef& tensor : tensors) operation->keep(tensor.storage);
  operation->keep(exchange);
  if (after && scope.channel == kCollectiveChannel)
    throw std::invalid_argument("what follows another operation needs a channel");
  const EventPtr caller = execution_.work_of_caller(op);
  Collective collective{operation, scope.members};
  if (runs_in_line(scope.channel))
    collective.common =
        checked(empty_message(op, scope.channel, prepared->plan(), scope.gradient_of));
  collective.messages_with = [this, op, channel = scope.channel, gradient_of = scope.gradient_of,
                              prepared = std::move(prepared),
                              exchange](std::span<const int> peers) {
    auto messages =
        exchange_messages(op, channel, prepared->plan(), exchange->lowered(), peers, gradient_of);
    for (PeerMessages& peer : messages) {
      peer.send = checked(peer.send);
      peer.recv = checked(peer.recv);
    }
    return exchange->requests(messages);
  };
  auto start = [this, collective = std::move(collective), channel = scope.channel, caller, exchange,
                on_success = std::move(on_success), is_async]() mutable {
    start_exchange(std::move(collective), channel, caller, exchange, std::move(on_success),
                   is_async);
  };
  if (scope.channel == kCollectiveChannel) {
    start();
    return operation;
  }
  sequencers_[scope.channel]->submit(after, operation,
                                     [this, operation, start = std::move(start)]() mutable {
                                       operation->restart(deadline_from_now());
                                       start();
                                     });
  return operation;
}

void Communicator::start_exchange(Collective collective, int channel, const EventPtr& caller,
                                  const std::shared_ptr<HostExchange>& exchange,
                                  std::function<void()> on_success, bool is_async) {
  Operation& operation = *collective.operation;
  exchange->take_memory();
  before_posting(operation, caller, [&] { exchange->begin(); });
  operation.on_success([exchange, on_success = std::move(on_success)] {
    exchange->end();
    if (on_success) on_success();
  });
  if (runs_in_line(channel)) collective.data_peers = peers_of(exchange->lowered());
  post_collective(std::move(collective), channel, is_async);
}

// The copies that precede the messages. On a device they, and those that follow the messages, come
// after the caller's work. An error there leaves peers waiting, so all ranks fail.
void Communicator::before_posting(const Operation& operation, const EventPtr& caller,
                                  const std::function<void()>& copy) {
  if (!execution_.is_on_device()) return copy();
  const auto fail_with = [&](FailureKind kind, const std::string& text) {
    fail({.kind = kind,
          .message = op_name(operation.op()) + text,
          .op = op_name(operation.op()),
          .rank = rank(),
          .origin_rank = rank()});
  };
  try {
    execution_.wait(caller, [&] {
      check_usable(operation.op());
      if (Clock::now() >= operation.deadline())
        fail_with(FailureKind::timeout,
                  " timed out after " + seconds_text(Clock::now() - operation.posted_at()) +
                      ": the caller's CUDA stream has not come to it, which may wait for "
                      "another rank itself");
    });
    copy();
  } catch (const PipeCommException&) {
    throw;
  } catch (const std::exception& error) {
    fail_with(FailureKind::error, std::string(" could not be enqueued: ") + error.what());
    check_usable(operation.op());
    throw;
  }
}

// Null: the messages lie in the tensors themselves.
std::shared_ptr<StagedBatch> Communicator::stage(Operation& operation,
                                                 std::span<const PointToPoint> batch,
                                                 const OwnMessages& own,
                                                 std::function<void()> on_success) {
  const EventPtr caller = execution_.work_of_caller(operation.op());
  auto staged = execution_.stage(batch, own);
  if (!staged) {
    if (on_success) operation.on_success(std::move(on_success));
    return nullptr;
  }
  before_posting(operation, caller, [&] {
    execution_.copy(staged->outgoing.tasks(), staged->outgoing.buffers(), Scale{});
  });
  operation.keep(staged);
  operation.on_success([this, staged, on_success = std::move(on_success)] {
    execution_.copy(staged->incoming.tasks(), staged->incoming.buffers(), Scale{});
    staged->memory.reset();
    if (on_success) on_success();
  });
  return staged;
}

OperationPtr Communicator::broadcast(const TensorRef& tensor, int source,
                                     std::function<void()> on_success, bool is_async) {
  check_usable(OpCode::broadcast);
  check_peer(source, size(), "source rank");
  const OperationPtr operation = make_operation(OpCode::broadcast);
  if (tensor.storage) operation->keep(tensor.storage);
  const Direction way = source == rank() ? Direction::send : Direction::recv;
  const PointToPoint whole{way, -1, kCollectiveChannel, tensor, 0};
  const auto staged = stage(*operation, {&whole, 1}, {}, std::move(on_success));
  std::byte* const data = staged ? staged->data[0] : tensor.data;
  Collective collective{operation, {}, checked(broadcast_message(tensor, source))};
  collective.source = source;
  collective.payload = data;
  collective.messages_with = [this, source, data,
                              common = collective.common](std::span<const int> peers) {
    std::vector<RequestPtr> requests;
    for (const Direction direction : {Direction::recv, Direction::send}) {
      for (const int peer : peers) {
        Descriptor descriptor = common;
        const bool has_payload = (direction == Direction::send ? rank() : peer) == source;
        if (!has_payload) descriptor.num_bytes = 0;
        requests.push_back(
            make_request(direction, peer, descriptor, descriptor.num_bytes > 0 ? data : nullptr));
      }
    }
    return requests;
  };
  post_collective(std::move(collective), kCollectiveChannel, is_async);
  return operation;
}

OperationPtr Communicator::barrier(bool is_async) {
  check_usable(OpCode::barrier);
  const OperationPtr operation = make_operation(OpCode::barrier);
  const Descriptor descriptor = describe(OpCode::barrier, kCollectiveChannel, {}, 0, 0);
  post_collective({operation, {}, descriptor, false, both_ways(descriptor)}, kCollectiveChannel,
                  is_async);
  return operation;
}

void Communicator::connect(std::span<const int> peers) {
  check_process();
  if (closed_ || failure()) return;
  for (const int peer : peers)
    if (peer != rank()) transport_->connect(peer);
}

// Only where all collectives are direct: it does not wait for its place in the line of the others.
OperationPtr Communicator::agree(OpCode op, const std::shared_ptr<Agreement>& agreement) {
  check_usable(op);
  const OperationPtr operation = make_operation(op);
  operation->keep(agreement);
  auto add = [&](Direction direction, int peer, const Descriptor& descriptor,
                 std::span<std::byte> note) {
    Request& request = operation->add_request(direction, peer, descriptor, note.data());
    request.num_note_bytes = static_cast<int64_t>(note.size());
  };
  for (const PeerMessages& pair : agreement->pairs())
    add(Direction::recv, pair.peer, pair.recv, agreement->heard(pair.peer));
  for (const PeerMessages& pair : agreement->pairs())
    add(Direction::send, pair.peer, pair.send, agreement->told());
  std::lock_guard lock(post_mutex_);
  post(operation);
  return operation;
}

OperationPtr Communicator::refuse(OpCode op, const std::string& reason, const Scope& scope) {
  check_usable(op);
  peers_in(scope);  // throws if it is not possible
  const OperationPtr operation = make_operation(op);
  const Descriptor descriptor = describe(op, scope.channel, {}, 0, 0);
  const auto refusals = [messages = both_ways(descriptor), reason](std::span<const int> peers) {
    auto requests = messages(peers);
    for (const RequestPtr& request : requests) {
      request->refuses = true;
      request->refusal = reason;
    }
    return requests;
  };
  auto post_now = [this, channel = scope.channel,
                   collective =
                       Collective{operation, scope.members, descriptor, true, refusals}]() mutable {
    post_collective(std::move(collective), channel);
  };
  if (scope.channel == kCollectiveChannel)
    post_now();
  else
    sequencers_[scope.channel]->submit(nullptr, operation, post_now);
  return operation;
}

bool Communicator::wait(Operation& operation, Deadline until,
                        const std::function<void()>& interrupted) {
  while (!operation.done()) {
    check_process();
    if (transport_->assist(operation) &&
        operation.wait_until(std::min(until, Clock::now() + 5 * kTick)))
      break;
    if (interrupted) interrupted();
    if (operation.failed_before(Clock::now() - kRestLimit)) break;
    if (Clock::now() >= until) return false;
  }
  if (const FailurePtr failure = operation.failure()) {
    operation.note_failure_seen();
    throw PipeCommException(failure);
  }
  return true;
}

}  // namespace pipecomm
