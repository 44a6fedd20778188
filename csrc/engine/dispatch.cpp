#include "engine/dispatch.h"

#include <algorithm>
#include <exception>
#include <numeric>

#include "engine/point_to_point.h"
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

Dispatch::Dispatch(const CommunicatorOptions& options)
    : options_(options), flight_record_(options.on_failure) {
  if (options_.size < 1 || options_.rank < 0 || options_.rank >= options_.size)
    throw std::invalid_argument("rank " + std::to_string(options_.rank) + " is not in a group of " +
                                std::to_string(options_.size));
  if (options_.num_channels < 1 || options_.num_channels > kMaxUserChannels)
    throw std::invalid_argument("channels must be 1 to " + std::to_string(kMaxUserChannels) +
                                ", not " + std::to_string(options_.num_channels));
  for (int rank = 0; rank < size(); ++rank)
    if (rank != options_.rank) others_.push_back(rank);
}

void Dispatch::start(const MakeTransport& make_transport, DispatchEvents& events) {
  events_ = &events;
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
    line_.reset();
    transport_.reset();  // its threads may call the events
    throw;
  }
}

// ------------------------------------------------------------------------------------------------
// checks

FailurePtr Dispatch::failure() const {
  std::lock_guard lock(mutex_);
  return failure_;
}

void Dispatch::check_process() const {
  if (!is_in_fork()) return;
  throw PipeCommException(own_failure(FailureKind::error,
                                      "this process was forked after the communicator was made, "
                                      "and has no part in its connections; make a new group and "
                                      "Communicator here"));
}

void Dispatch::check_usable(OpCode op) const {
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

Descriptor Dispatch::checked(const Descriptor& descriptor) const {
  if (options_.checks) return descriptor;
  return describe(descriptor.op, descriptor.channel, {}, 0, descriptor.num_bytes);
}

Deadline Dispatch::deadline_from_now() const {
  return options_.timeout
             ? Clock::now() + std::chrono::duration_cast<Clock::duration>(*options_.timeout)
             : Deadline::max();
}

OperationPtr Dispatch::make_operation(OpCode op) const {
  return std::allocate_shared<Operation>(Recycled<Operation>(), op, deadline_from_now());
}

std::vector<int> Dispatch::peers_in(const Scope& scope) const {
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

std::unique_lock<std::mutex> Dispatch::lock_posts(OpCode op) {
  std::unique_lock lock(post_mutex_);
  check_usable(op);  // now that no other thread can close in between
  return lock;
}

void Dispatch::post(const OperationPtr& operation, bool is_async) {
  const auto lock = lock_posts(operation->op());
  number(*operation);
  const RequestList requests = operation->seal();
  if (requests.empty()) return;
  if (requests.front()->descriptor.channel == kCollectiveChannel)
    operation->set_number_of_collective(++num_collectives_);
  for (const RequestPtr& request : requests) request->operation = operation;
  note_in_flight(operation);
  try {
    transport_->post(requests, is_async);
  } catch (const std::exception& error) {
    on_broken(error.what());  // peers may have got a part of it
  }
  operation->note_posted();
}

// With the lock. The caller destroys the result without it: an operation may have no other owner.
std::vector<OperationPtr> Dispatch::in_flight() const {
  std::vector<OperationPtr> operations;
  for (size_t idx = 0; idx < in_flight_.size(); ++idx)
    if (OperationPtr operation = in_flight_[idx].lock()) operations.push_back(std::move(operation));
  return operations;
}

void Dispatch::note_in_flight(const OperationPtr& operation) {
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
void Dispatch::note_ended(const Operation& operation) {
  OperationPtr last;  // if it is another operation, it is destroyed without the lock
  std::lock_guard lock(mutex_);
  if (in_flight_.empty()) return;
  last = in_flight_.back().lock();
  if (last.get() == &operation) in_flight_.pop_back();
}

void Dispatch::post_collective(Collective collective, int channel, bool is_async) {
  const OperationPtr operation = collective.operation;
  if (!runs_in_line(channel)) {
    operation->add_requests(collective.messages_with(peers_in({collective.members, channel})));
    return post(operation, is_async);
  }
  const auto lock = lock_posts(operation->op());
  number(*operation);
  operation->set_number_of_collective(++num_collectives_);
  note_in_flight(operation);
  line_->submit(std::move(collective), is_async);
}

OperationPtr Dispatch::post_barrier(bool is_async, OpCode op) {
  const OperationPtr operation = make_operation(op);
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

OperationPtr Dispatch::post_refusal(OpCode op, const std::string& reason, const Scope& scope) {
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

bool Dispatch::wait(Operation& operation, Deadline until, const Interrupted& interrupted) {
  while (!operation.done()) {
    check_process();
    if (events_->assist(operation) &&
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

}  // namespace pipecomm
