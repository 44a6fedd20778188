#include "engine/communicator.h"

#include <unistd.h>

#include <algorithm>
#include <exception>
#include <functional>
#include <numeric>

#include "copy/copy_cpu.h"
#include "engine/message_copy.h"
#include "plan/signature.h"

namespace pipecomm {
namespace {

constexpr auto kTick = std::chrono::milliseconds(20);
// How long a batch whose failure is known waits for the rest of it, which mostly comes through.
constexpr auto kRestLimit = std::chrono::seconds(1);
constexpr auto kGoodbyeLimit = std::chrono::seconds(2);
constexpr size_t kMinSweep = 1024;

// The communicator's failure as one of its operations reports it: with what that operation was
// waiting for.
FailurePtr failure_for(const FailurePtr& failure, const Operation& operation) {
  const RequestPtr request = operation.first_pending();
  if (!request) return failure;
  auto own = std::make_shared<Failure>(*failure);
  const Descriptor& descriptor = request->descriptor;
  name_message(*own, request->peer, descriptor);
  own->message +=
      "; this rank was waiting for " + request_text(*request) + " of " + descriptor.text();
  return own;
}

}  // namespace

Communicator::Communicator(const CommunicatorOptions& options, const MakeTransport& make_transport)
    : options_(options),
      owner_pid_(getpid()),
      flight_record_(options.on_failure),
      copy_pool_(options.num_threads) {
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
  watchdog_ = std::thread([this] { watch(); });
}

Communicator::~Communicator() {
  if (closed_) return;
  {
    std::scoped_lock lock(post_mutex_, mutex_);
    closing_ = true;  // for what is still to be posted
  }
  // Nobody can wait for operations any more; peers learn it from the goodbye.
  if (const FailurePtr failed = failure()) tell_peers(*failed);
  transport_->begin_close();
  end();
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
  Failure closed{.kind = FailureKind::aborted,
                 .message = std::string(op_name(op)) +
                            " on a closed communicator; create a new Communicator to go on",
                 .op = op_name(op),
                 .rank = rank(),
                 .origin_rank = rank()};
  throw PipeCommException(std::make_shared<Failure>(std::move(closed)));
}

// ------------------------------------------------------------------------------------------------
// operations

Descriptor Communicator::describe(OpCode op, int channel, const TensorRef& tensor,
                                  uint64_t signature, int64_t num_bytes) const {
  if (!options_.checks) return pipecomm::describe(op, channel, {}, 0, num_bytes);
  return pipecomm::describe(op, channel, tensor, signature, num_bytes);
}

Deadline Communicator::deadline_from_now() const {
  return options_.timeout
             ? Clock::now() + std::chrono::duration_cast<Clock::duration>(*options_.timeout)
             : Deadline::max();
}

OperationPtr Communicator::make_operation(OpCode op) {
  return std::make_shared<Operation>(op, deadline_from_now());
}

// The other ranks that take part.
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

// With `post_mutex_` held, so that nobody closes in between.
void Communicator::post(const OperationPtr& operation, bool is_async) {
  check_usable(operation->op());
  operation->record_in(flight_record_, num_posted_++);
  std::vector<RequestPtr> requests = operation->seal();
  if (requests.empty()) return;
  for (const RequestPtr& request : requests) request->operation = operation;
  transport_->post(std::move(requests), is_async);
  operation->note_posted();
  std::unique_lock lock(mutex_);
  if (failure_) {  // since the check above: nobody else knows of this operation
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

OperationPtr Communicator::batch_p2p(std::span<const PointToPoint> batch,
                                     std::function<void()> on_success, bool is_async) {
  check_usable(OpCode::p2p);
  check_batch(batch, size(), options_.num_channels);
  const OperationPtr operation = make_operation(OpCode::p2p);
  for (const auto& [send, recv] : pair_own_messages(batch, rank()))
    std::copy_n(send->tensor.data, send->tensor.num_bytes(), recv->tensor.data);
  for (const PointToPoint& op : batch) {
    if (op.tensor.storage) operation->keep(op.tensor.storage);
    if (op.peer == rank()) continue;
    operation->add_request(
        op.direction, op.peer,
        describe(OpCode::p2p, op.channel, op.tensor, op.signature, op.tensor.num_bytes()),
        op.tensor.data);
  }
  if (on_success) operation->on_success(std::move(on_success));
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
  prepared->lowered_for(rank(), size(), inputs, outputs);  // refuses what does not fit the plan
  peers_in(scope);
  const OperationPtr operation = make_operation(op);
  for (const auto tensors : {inputs, outputs})
    for (const TensorRef& tensor : tensors) operation->keep(tensor.storage);
  if (scope.channel == kCollectiveChannel) {
    if (after) throw std::invalid_argument("what follows another operation needs a channel");
    start_exchange(operation, *prepared, inputs, outputs, std::move(on_success), is_async, scope);
    return operation;
  }
  sequencers_[scope.channel]->submit(
      after, operation,
      [this, operation, prepared, inputs = std::vector(inputs.begin(), inputs.end()),
       outputs = std::vector(outputs.begin(), outputs.end()), on_success = std::move(on_success),
       is_async, scope]() mutable {
        operation->restart(deadline_from_now());
        start_exchange(operation, *prepared, inputs, outputs, std::move(on_success), is_async,
                       scope);
      });
  return operation;
}

void Communicator::start_exchange(const OperationPtr& operation, PreparedExchange& prepared,
                                  std::span<const TensorRef> inputs,
                                  std::span<const TensorRef> outputs,
                                  std::function<void()> on_success, bool is_async,
                                  const Scope& scope) {
  const OpCode op = operation->op();
  const ExchangePlan& plan = prepared.plan();
  const auto lowered = prepared.lowered_for(rank(), size(), inputs, outputs);

  const bool stages = !transport_->copies_on_the_way();
  auto memory = std::make_shared<ExchangeBuffers>();
  for (const TensorRef& tensor : inputs) memory->inputs.push_back(tensor.data);
  for (const TensorRef& tensor : outputs) memory->outputs.push_back(tensor.data);
  if (stages) {
    memory->send_staging = staging_.acquire(lowered->send_staging_bytes);
    memory->recv_staging = staging_.acquire(lowered->recv_staging_bytes);
  }
  operation->keep(memory);

  auto copy = [this](std::span<const CopyTask> tasks, const CopyBuffers& buffers,
                     const Scale& scale) {
    if (tasks.empty()) return;
    std::unique_lock lock(copy_pool_mutex_, std::try_to_lock);
    execute_cpu(tasks, buffers, scale, lock ? &copy_pool_ : nullptr);
  };
  copy(stages ? lowered->pack_and_local() : lowered->local(), memory->view(), lowered->scale);
  operation->on_success([copy, stages, lowered, memory, on_success = std::move(on_success)] {
    if (stages) copy(lowered->unpack(), memory->view(), Scale{});
    // Back in the pool before waiters run, so that their next exchange finds it there.
    memory->send_staging.reset();
    memory->recv_staging.reset();
    if (on_success) on_success();
  });

  // One message per ordered pair, empty ones too: that is how ranks hear of each other.
  TensorRef shown;
  if (plan.shown) {
    shown.shape = plan.shown->shape;
    shown.dtype = plan.shown->dtype;
  } else if (!inputs.empty() || !outputs.empty()) {
    shown = !inputs.empty() ? inputs[0] : outputs[0];
  }
  const std::vector<int> peers = peers_in(scope);
  auto add_requests = [&](Direction direction, const std::vector<LoweredMessage>& messages) {
    auto message = messages.begin();
    for (const int peer : peers) {
      std::byte* data = nullptr;
      int64_t num_bytes = 0;
      uint64_t signature = plan.signature;
      std::shared_ptr<const MessageCopy> on_the_way;
      if (message != messages.end() && message->peer == peer) {
        const bool sends = direction == Direction::send;
        num_bytes = message->bytes;
        signature ^= message->dtypes;
        if (!message->is_staged())
          data = (sends ? inputs : outputs)[message->tensor_idx].data + message->offset_bytes;
        else if (stages)
          data =
              (sends ? memory->send_staging : memory->recv_staging).get() + message->offset_bytes;
        else
          on_the_way = std::make_shared<const MessageCopy>(MessageCopy{lowered, &*message, memory});
        ++message;
      }
      Request& request = operation->add_request(
          direction, peer, describe(op, scope.channel, shown, signature, num_bytes), data);
      request.copy = std::move(on_the_way);
    }
    if (message != messages.end())
      throw std::invalid_argument("the plan has a message for rank " +
                                  std::to_string(message->peer) + ", which is no member");
  };
  add_requests(Direction::recv, lowered->recvs);
  add_requests(Direction::send, lowered->sends);
  ++num_exchanges_;
  num_passes_ += lowered->copy_passes();
  std::lock_guard lock(post_mutex_);
  post(operation, is_async);
}

OperationPtr Communicator::broadcast(const TensorRef& tensor, int source,
                                     std::function<void()> on_success, bool is_async) {
  check_usable(OpCode::broadcast);
  check_peer(source, size(), "source rank");
  const uint64_t signature =
      Signature("broadcast").add(source).add(tensor.dtype).add(tensor.shape).value();
  const OperationPtr operation = make_operation(OpCode::broadcast);
  if (tensor.storage) operation->keep(tensor.storage);
  for (Direction direction : {Direction::recv, Direction::send}) {
    for (int peer = 0; peer < size(); ++peer) {
      if (peer == rank()) continue;
      const int sender = direction == Direction::send ? rank() : peer;
      const int64_t num_bytes = sender == source ? tensor.num_bytes() : 0;
      operation->add_request(
          direction, peer,
          describe(OpCode::broadcast, kCollectiveChannel, tensor, signature, num_bytes),
          num_bytes > 0 ? tensor.data : nullptr);
    }
  }
  if (on_success) operation->on_success(std::move(on_success));
  std::lock_guard lock(post_mutex_);
  post(operation, is_async);
  return operation;
}

OperationPtr Communicator::barrier(bool is_async) {
  return agree(OpCode::barrier, {}, 0, is_async);
}

OperationPtr Communicator::agree(OpCode op, const TensorRef& shown, uint64_t signature,
                                 bool is_async, const Scope& scope) {
  check_usable(op);
  const OperationPtr operation = make_operation(op);
  const Descriptor descriptor = describe(op, scope.channel, shown, signature, 0);
  const std::vector<int> peers = peers_in(scope);
  for (Direction direction : {Direction::recv, Direction::send})
    for (const int peer : peers) operation->add_request(direction, peer, descriptor, nullptr);
  std::lock_guard lock(post_mutex_);
  post(operation, is_async);
  return operation;
}

OperationPtr Communicator::refuse(OpCode op, const std::string& reason, const Scope& scope) {
  check_usable(op);
  const std::vector<int> peers = peers_in(scope);
  const OperationPtr operation = make_operation(op);
  for (Direction direction : {Direction::recv, Direction::send}) {
    for (const int peer : peers) {
      Request& request =
          operation->add_request(direction, peer, describe(op, scope.channel, {}, 0, 0), nullptr);
      request.refuses = true;
      request.refusal = reason;
    }
  }
  auto post_now = [this, operation] {
    std::lock_guard lock(post_mutex_);
    post(operation);
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

// ------------------------------------------------------------------------------------------------
// failure and end

void Communicator::fail(Failure failure) {
  // Whoever comes second returns when all has failed, not before: what its peer said next must not
  // reach operations ahead of the cause.
  std::lock_guard failing_lock(failing_mutex_);
  auto shared = std::make_shared<const Failure>(std::move(failure));
  std::deque<std::weak_ptr<Operation>> in_flight;
  {
    std::lock_guard lock(mutex_);
    if (failure_ || closed_) return;
    failure_ = shared;
    in_flight.swap(in_flight_);
  }
  tell_peers(*shared);
  for (const auto& weak : in_flight)
    if (const OperationPtr operation = weak.lock())
      operation->fail(failure_for(shared, *operation));
  flight_record_.note_failure();
}

// Whoever comes second returns when the first one has told all peers.
void Communicator::tell_peers(const Failure& failure) {
  std::lock_guard telling_lock(telling_mutex_);
  transport_->abort(failure);
}

std::vector<Flight> Communicator::flights() const {
  if (is_in_fork()) return {};
  std::deque<std::weak_ptr<Operation>> in_flight;
  {
    std::lock_guard lock(mutex_);
    in_flight = in_flight_;
  }
  std::vector<Flight> pending;
  for (const auto& weak : in_flight)
    if (const OperationPtr operation = weak.lock())
      if (auto flight = operation->pending_flight()) pending.push_back(*std::move(flight));
  return merge_flights(std::move(pending), flight_record_.ended());
}

void Communicator::abort(const std::string& reason) {
  if (is_in_fork()) return;
  fail({.kind = FailureKind::aborted,
        .message = "communicator aborted by rank " + std::to_string(rank()) +
                   (reason.empty() ? "" : ": " + reason),
        .rank = rank(),
        .origin_rank = rank()});
}

void Communicator::on_peer_lost(int peer, const std::string& why) {
  fail({.kind = FailureKind::peer_lost,
        .message = "lost the connection to rank " + std::to_string(peer) +
                   ", which died or was cut off (" + why +
                   "); to go on, make a new group and Communicator of the other ranks",
        .rank = rank(),
        .peer = peer,
        .origin_rank = peer});
}

void Communicator::on_remote_failure(const Failure& remote) {
  Failure failure = remote;
  failure.rank = rank();
  failure.message =
      "communicator failed on rank " + std::to_string(remote.rank) + ": " + remote.message;
  fail(std::move(failure));
}

void Communicator::on_broken(const std::string& why) {
  fail({.kind = FailureKind::error,
        .message = "transport failure: " + why,
        .rank = rank(),
        .origin_rank = rank()});
}

void Communicator::on_claim(int peer, Direction direction, const Descriptor& descriptor) {
  if (options_.on_claim) options_.on_claim(peer, direction, descriptor);
}

void Communicator::expire(Operation& operation) {
  Failure failure{.kind = FailureKind::timeout,
                  .op = op_name(operation.op()),
                  .rank = rank(),
                  .origin_rank = rank()};
  std::string text = std::string(op_name(operation.op())) + " timed out after " +
                     seconds_text(Clock::now() - operation.posted_at()) + " (limit " +
                     seconds_text(operation.deadline() - operation.posted_at()) + "), " +
                     operation.pending_text();
  if (const RequestPtr request = operation.first_pending())
    text +=
        "; rank " + std::to_string(request->peer) + " " + transport_->describe_peer(request->peer);
  failure.message =
      text + "; check that the other rank calls the matching operation, or raise timeout=";
  fail(std::move(failure));
}

void Communicator::watch() {
  std::unique_lock lock(mutex_);
  while (!stop_watching_) {
    stop_watch_.wait_for(lock, kTick);
    OperationPtr expired;
    while (!in_flight_.empty()) {
      OperationPtr oldest = in_flight_.front().lock();
      if (oldest && !oldest->done()) {
        if (Clock::now() >= oldest->deadline()) expired = std::move(oldest);
        break;
      }
      in_flight_.pop_front();
    }
    lock.unlock();
    transport_->tick();
    // The rest of a failed batch, which nobody waits for any more, is no failure of its own.
    if (expired && expired->failure())
      expired->fail(nullptr);
    else if (expired && !expired->done())
      expire(*expired);
    expired.reset();
    lock.lock();
  }
}

void Communicator::close(const std::function<void()>& interrupted) {
  if (is_in_fork()) return;
  std::exception_ptr error;
  try {
    for (const auto& sequencer : sequencers_)
      while (!sequencer->wait_until_idle(Clock::now() + 5 * kTick))
        if (interrupted) interrupted();
  } catch (...) {
    error = std::current_exception();
  }
  std::vector<OperationPtr> pending;
  FailurePtr failed_before;
  {
    std::lock_guard post_lock(post_mutex_);
    std::lock_guard lock(mutex_);
    if (std::exchange(closing_, true)) return;
    failed_before = failure_;
    for (const auto& weak : in_flight_)
      if (OperationPtr operation = weak.lock()) pending.push_back(std::move(operation));
  }
  // The thread that failed it may not have told all peers yet, and they must hear that first.
  if (failed_before) tell_peers(*failed_before);
  transport_->begin_close();
  if (!failed_before && !error) {
    for (const OperationPtr& operation : pending) {
      if (operation->failure_seen()) continue;
      try {
        wait(*operation, Deadline::max(), interrupted);
      } catch (const PipeCommException&) {
        if (!error) error = std::current_exception();
      } catch (...) {
        error = std::current_exception();
        break;
      }
    }
  }
  pending.clear();
  end();
  if (error) std::rethrow_exception(error);
}

// Whatever is pending now has nobody left who could complete it.
void Communicator::end() {
  transport_->close(Clock::now() + kGoodbyeLimit);
  std::deque<std::weak_ptr<Operation>> in_flight;
  {
    std::lock_guard lock(mutex_);
    closing_ = stop_watching_ = closed_ = true;
    in_flight.swap(in_flight_);
  }
  stop_watch_.notify_all();
  watchdog_.join();
  for (const auto& weak : in_flight) {
    const OperationPtr operation = weak.lock();
    if (!operation || operation->done()) continue;
    const auto failure = std::make_shared<Failure>(Failure{
        .kind = FailureKind::aborted,
        .message =
            std::string(op_name(operation->op())) + " was pending when its communicator was closed",
        .op = op_name(operation->op()),
        .rank = rank(),
        .origin_rank = rank()});
    operation->fail(failure_for(failure, *operation));
  }
  sequencers_.clear();
}

}  // namespace pipecomm
