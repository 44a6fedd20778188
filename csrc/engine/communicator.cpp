#include "engine/communicator.h"

#include <algorithm>
#include <exception>
#include <functional>
#include <numeric>

#include "engine/host_execution.h"
#include "message/recycled.h"
#include "message/start_thread.h"

namespace pipecomm {
namespace {

// How long a failed batch waits for its other messages, most of which complete.
constexpr auto kRestLimit = std::chrono::seconds(1);
constexpr size_t kMinSweep = 1024;

// Messages without data to and from some ranks.
auto both_ways(const Descriptor& descriptor) {
  return [descriptor](std::span<const int> peers) {
    RequestList requests;
    for (const Direction direction : {Direction::recv, Direction::send})
      for (const int peer : peers)
        requests.push_back(make_request(direction, peer, descriptor, nullptr));
    return requests;
  };
}

bool increase(const std::vector<int>& ranks) {
  return std::ranges::adjacent_find(ranks, std::greater_equal<>()) == ranks.end();
}

}  // namespace

Communicator::Communicator(const CommunicatorOptions& options, const MakeTransport& make_transport,
                           const MakeExecution& make_execution)
    : Communicator(Unstarted(), options, make_transport, make_execution) {
  execution_->start();  // if it throws, the destructor does the rest
}

Communicator::Communicator(Unstarted, const CommunicatorOptions& options,
                           const MakeTransport& make_transport, const MakeExecution& make_execution)
    : options_(options), flight_record_(options.on_failure) {
  if (options_.size < 1 || options_.rank < 0 || options_.rank >= options_.size)
    throw std::invalid_argument("rank " + std::to_string(options_.rank) + " is not in a group of " +
                                std::to_string(options_.size));
  if (options_.num_channels < 1 || options_.num_channels > kMaxUserChannels)
    throw std::invalid_argument("channels must be 1 to " + std::to_string(kMaxUserChannels) +
                                ", not " + std::to_string(options_.num_channels));
  for (int rank = 0; rank < size(); ++rank)
    if (rank != options_.rank) others_.push_back(rank);
  execution_ = make_execution ? make_execution(*this) : std::make_unique<HostExecution>(*this);
  {
    // Threads of the transport that have a failure to report wait until there is a transport to
    // abort.
    std::lock_guard lock(mutex_);
    transport_ = make_transport(*this);
    if (size() > options_.direct_limit)
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

void Communicator::check_process() const {
  if (!is_in_fork()) return;
  throw PipeCommException(own_failure(FailureKind::error,
                                      "this process was forked after the communicator was made, "
                                      "and has no part in its connections; make a new group and "
                                      "Communicator here"));
}

void Communicator::check_usable(OpCode op) const {
  check_process();
  if (state_ == CommunicatorState::open) return;
  std::lock_guard lock(mutex_);
  if (failure_) throw PipeCommException(failure_);
  const std::string name = op_name(op);
  throw PipeCommException(
      own_failure(FailureKind::aborted,
                  name + " on a closed communicator; create a new Communicator to go on", name));
}

// ------------------------------------------------------------------------------------------------
// operations

Descriptor Communicator::checked(const Descriptor& descriptor) const {
  if (options_.checks) return descriptor;
  return describe(descriptor.op, descriptor.channel, {}, 0, descriptor.num_bytes);
}

Deadline Communicator::deadline_from_now() const {
  return options_.timeout
             ? Clock::now() + std::chrono::duration_cast<Clock::duration>(*options_.timeout)
             : Deadline::max();
}

OperationPtr Communicator::make_operation(OpCode op) const {
  return std::allocate_shared<Operation>(Recycled<Operation>(), op, deadline_from_now());
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
  if (!increase(peers) || peers.front() < 0 || peers.back() >= size() ||
      std::erase(peers, rank()) == 0)
    throw std::invalid_argument("members must be increasing ranks of 0.." +
                                std::to_string(size() - 1) + " with this rank, " +
                                std::to_string(rank()) + ", among them");
  if (!scope.within.empty() &&
      (scope.members.empty() || scope.within.back() >= size() || scope.within.front() < 0 ||
       !increase(scope.within) || !std::ranges::includes(scope.within, scope.members)))
    throw std::invalid_argument("within must be increasing ranks of 0.." +
                                std::to_string(size() - 1) + " with the members among them");
  return peers;
}

std::unique_lock<std::mutex> Communicator::lock_posts(OpCode op) {
  std::unique_lock lock(post_mutex_);
  check_usable(op);  // now that no other thread can close in between
  return lock;
}

void Communicator::post(const OperationPtr& operation, bool is_async) {
  const auto lock = lock_posts(operation->op());
  post_locked(operation, is_async);
}

void Communicator::post_locked(const OperationPtr& operation, bool is_async) {
  number(*operation);
  const RequestList requests = operation->seal();
  if (requests.empty()) return;
  if (requests.front()->descriptor.channel == kCollectiveChannel)
    operation->set_number_of_collective(++num_collectives_);
  for (const RequestPtr& request : requests) request->operation = operation;
  note_in_flight(operation);
  transport_->post(requests, is_async);
  operation->note_posted();
}

// With the lock. The caller destroys the result without it: an operation may have no other owner.
std::vector<OperationPtr> Communicator::in_flight() const {
  std::vector<OperationPtr> operations;
  for (size_t idx = 0; idx < in_flight_.size(); ++idx)
    if (OperationPtr operation = in_flight_[idx].lock()) operations.push_back(std::move(operation));
  return operations;
}

void Communicator::note_in_flight(const OperationPtr& operation) {
  std::vector<OperationPtr> swept;  // destroyed without the lock: they may have no other owner
  std::unique_lock lock(mutex_);
  if (failure_) {  // since the check above, and without this operation
    const FailurePtr failure = failure_;
    lock.unlock();
    return operation->fail(failure_for(failure, *operation));
  }
  if (in_flight_.size() >= sweep_at_) {
    in_flight_.erase_if([&](const auto& weak) {
      swept.push_back(weak.lock());
      return !swept.back() || swept.back()->done();
    });
    sweep_at_ = std::max(kMinSweep, 2 * in_flight_.size());
  }
  in_flight_.push_back(operation);
  if (std::exchange(is_watchdog_idle_, false)) wake_watchdog_.notify_one();
}

// Operations that callers wait for mostly end in the reverse order of their start.
void Communicator::note_ended(const Operation& operation) {
  OperationPtr last;  // if it is another operation, it is destroyed without the lock
  std::lock_guard lock(mutex_);
  if (in_flight_.empty()) return;
  last = in_flight_.back().lock();
  if (last.get() == &operation) in_flight_.pop_back();
}

void Communicator::post_collective(Collective collective, int channel, bool is_async) {
  const OperationPtr operation = collective.operation;
  const bool is_direct = !runs_in_line(channel);
  if (is_direct)
    operation->add_requests(collective.messages_with(peers_in({collective.members, channel})));
  const auto lock = lock_posts(operation->op());
  if (is_direct) return post_locked(operation, is_async);
  number(*operation);
  operation->set_number_of_collective(++num_collectives_);
  note_in_flight(operation);
  line_->submit(std::move(collective), is_async);
}

OperationPtr Communicator::post_barrier(bool is_async) {
  const OperationPtr operation = make_operation(OpCode::barrier);
  const Descriptor descriptor = describe(OpCode::barrier, kCollectiveChannel, {}, 0, 0);
  if (!runs_in_line(kCollectiveChannel)) {
    operation->add_requests(both_ways(descriptor)(others()));
    post(operation, is_async);
    return operation;
  }
  post_collective({operation, {}, descriptor, false, both_ways(descriptor)}, kCollectiveChannel,
                  is_async);
  return operation;
}

OperationPtr Communicator::post_refusal(OpCode op, const std::string& reason, const Scope& scope) {
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
    post_after(scope.channel, nullptr, operation, post_now);
  return operation;
}

// ------------------------------------------------------------------------------------------------
// calls

OperationPtr Communicator::batch_p2p(std::span<const PointToPoint> batch, CallOptions options) {
  check_usable(OpCode::p2p);
  check_batch(batch, size(), options_.num_channels);
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
    if (peer != rank()) transport_->connect(peer);
  execution_->connect(peers, channels, direction);
}

void Communicator::connect(const Scope& scope) {
  check_process();
  const std::vector<int> peers = peers_in(scope);
  if (closed() || failure()) return;
  for (const int peer : peers) transport_->connect(peer);
  execution_->connect(scope);
}

bool Communicator::wait(Operation& operation, Deadline until, const Interrupted& interrupted) {
  while (!operation.done()) {
    check_process();
    if (execution_->assist(operation) &&
        operation.wait_until(std::min(until, Clock::now() + 5 * kTick)))
      break;
    if (interrupted) interrupted();
    if (operation.failed_before(Clock::now() - kRestLimit)) break;
    if (Clock::now() >= until) return false;
  }
  if (operation.done()) note_ended(operation);
  if (const FailurePtr failure = operation.failure()) {
    operation.note_failure_seen();
    throw PipeCommException(failure);
  }
  return true;
}

void Communicator::follow(Operation& operation, const Interrupted& interrupted) {
  check_process();
  if (!execution_->follow(operation)) wait(operation, Deadline::max(), interrupted);
}

bool Communicator::is_completed(Operation& operation) {
  return is_in_fork() ? operation.done() : execution_->poll(operation);
}

}  // namespace pipecomm
