// How a communicator fails, on this rank and on all others, and how it ends.
#include <algorithm>
#include <exception>
#include <set>
#include <utility>

#include "engine/dispatch.h"

namespace pipecomm {
namespace {

constexpr auto kGoodbyeLimit = std::chrono::seconds(2);

}  // namespace

// With `mutex_` held.
void Dispatch::enter(CommunicatorState state, const std::string& why) {
  connection_events_->enter(state_, state, "communicator", -1, why);
}

void Dispatch::drop() {
  if (closed()) return;
  {
    std::scoped_lock lock(post_mutex_, mutex_);
    // So that later posts are refused. An exception may have cut close() short.
    if (state_ < CommunicatorState::closing) enter(CommunicatorState::closing);
  }
  events_->end(false);
  std::vector<OperationPtr> pending;
  {
    std::lock_guard lock(mutex_);
    pending = in_flight();
  }
  // No thread can wait for operations any more. The goodbye tells the peers, unless they may be
  // waiting for messages that will not come.
  if (line_) line_->stop();
  if (std::any_of(pending.begin(), pending.end(), [](const auto& each) { return !each->done(); }))
    abort("its communicator was dropped with operations in flight, without close()");
  pending.clear();
  if (const FailurePtr failed = failure()) tell_peers(*failed);
  transport_->begin_close();
  end();
}

FailurePtr Dispatch::failure_for(const FailurePtr& failure, const Operation& operation) {
  auto own = std::make_shared<Failure>(*failure);
  if (const RequestPtr request = operation.first_pending()) {
    const Descriptor& descriptor = request->descriptor;
    name_message(*own, request->peer, descriptor);
    own->message +=
        "; this rank was waiting for " + request_text(*request) + " of " + descriptor.text();
  } else if (operation.waits_to_start()) {
    own->op = op_name(operation.op());
    own->message += "; this rank was waiting to start " + own->op + " behind other collectives";
  }
  return own;
}

void Dispatch::fail(Failure failure) {
  // A second caller returns only once all operations have failed: the next message from its peer
  // must not reach operations ahead of the cause.
  std::lock_guard failing_lock(failing_mutex_);
  auto shared = std::make_shared<const Failure>(std::move(failure));
  std::vector<OperationPtr> pending;
  {
    std::lock_guard lock(mutex_);
    if (failure_ || closed()) return;
    failure_ = shared;
    if (state_ == CommunicatorState::open) enter(CommunicatorState::failed, shared->message);
    pending = in_flight();
    in_flight_.clear();
  }
  tell_peers(*shared);
  for (const OperationPtr& operation : pending) operation->fail(failure_for(shared, *operation));
  if (line_) line_->stop();
  flight_record_.note_failure();
}

// A second caller returns once the first one has told all peers.
void Dispatch::tell_peers(const Failure& failure) {
  std::lock_guard telling_lock(telling_mutex_);
  transport_->abort(failure);
}

std::vector<Flight> Dispatch::flights() const {
  if (is_in_fork()) return {};
  std::vector<OperationPtr> operations;
  {
    std::lock_guard lock(mutex_);
    operations = in_flight();
  }
  std::vector<Flight> pending;
  for (const OperationPtr& operation : operations)
    if (auto flight = operation->pending_flight()) pending.push_back(*std::move(flight));
  return merge_flights(std::move(pending), flight_record_.ended());
}

std::vector<ConnectionEvent> Dispatch::connections() const {
  if (is_in_fork()) return {};
  std::vector<ConnectionEvent> events = connection_events_->all();
  std::set<std::pair<std::string, int>> seen;
  for (auto event = events.rbegin(); event != events.rend(); ++event)
    if (event->peer >= 0 && seen.emplace(event->connection, event->peer).second)
      event->peer_now = describe_peer(event->peer);
  return events;
}

void Dispatch::abort(const std::string& reason, const FailurePtr& cause) {
  if (is_in_fork()) return;
  if (cause) return fail(*cause);
  fail(own_failure(FailureKind::aborted, "communicator aborted by rank " + std::to_string(rank()) +
                                             (reason.empty() ? "" : ": " + reason)));
}

void Dispatch::on_peer_lost(int peer, const std::string& why) {
  fail({.kind = FailureKind::peer_lost,
        .message = "lost the connection to rank " + std::to_string(peer) +
                   ", which died or was cut off (" + why +
                   "); to go on, make a new group and Communicator of the other ranks",
        .rank = rank(),
        .peer = peer,
        .origin_rank = peer});
}

void Dispatch::on_remote_failure(const Failure& remote) {
  Failure failure = remote;
  failure.rank = rank();
  failure.message =
      "communicator failed on rank " + std::to_string(remote.rank) + ": " + remote.message;
  fail(std::move(failure));
}

void Dispatch::on_refused(int peer, const std::string& why) {
  fail({.kind = FailureKind::mismatch,
        .message = why,
        .op = "Communicator",
        .rank = rank(),
        .peer = peer,
        .origin_rank = peer});
}

void Dispatch::on_broken(const std::string& why) {
  fail(own_failure(FailureKind::error, "transport failure: " + why));
}

void Dispatch::on_control(int peer, std::span<const std::byte> message) {
  {
    std::lock_guard lock(mutex_);  // waits until there is a transport for the answer
  }
  events_->on_control(peer, message);
}

void Dispatch::expire(Operation& operation) {
  if (operation.is_on_device()) return events_->expire(operation);
  std::string text = std::string(op_name(operation.op())) + " timed out after " +
                     seconds_text(Clock::now() - operation.posted_at()) + " (limit " +
                     seconds_text(operation.deadline() - operation.posted_at()) + "), " +
                     operation.pending_text();
  if (const RequestPtr request = operation.first_pending()) {
    text +=
        "; rank " + std::to_string(request->peer) + " " + transport_->describe_peer(request->peer);
    if (request->descriptor.channel == kControlChannel)
      text += " and speaks for other ranks as well";
  }
  text += "; check that the other rank calls the matching operation, or increase timeout=";
  text += kFlightHint;
  fail(own_failure(FailureKind::timeout, text, op_name(operation.op())));
}

void Dispatch::watch() {
  std::unique_lock lock(mutex_);
  for (int num_idle_ticks = 0; !stop_watching_;) {
    is_watchdog_idle_ = num_idle_ticks >= kTicksUntilIdle;
    wake_watchdog_.wait_for(lock, is_watchdog_idle_ ? kIdleTick : kTick);
    is_watchdog_idle_ = false;
    std::vector<OperationPtr> ended;  // destroyed without the lock: they may have no other owner
    OperationPtr oldest;
    while (!in_flight_.empty()) {
      oldest = in_flight_.front().lock();
      if (oldest && !oldest->done()) break;
      if (oldest) ended.push_back(std::move(oldest));
      in_flight_.pop_front();
    }
    num_idle_ticks = in_flight_.empty() && !failure_ ? num_idle_ticks + 1 : 0;
    OperationPtr expired = oldest && events_->is_late(*oldest) ? oldest : nullptr;
    lock.unlock();
    ended.clear();
    oldest.reset();
    if (transport_->tick()) num_idle_ticks = 0;
    if (events_->tick()) num_idle_ticks = 0;
    // The rest of a failed batch, for which no thread waits any more, does not fail the communicator.
    if (expired && expired->failure())
      expired->fail(nullptr);
    else if (expired && !expired->done())
      expire(*expired);
    expired.reset();
    lock.lock();
  }
}

// Whether what is left of it are receives that no message has met.
static bool has_only_receives(const Operation& operation) {
  const RequestList requests = operation.requests();
  return std::all_of(requests.begin(), requests.end(), [](const RequestPtr& request) {
    return request->settled || (request->direction == Direction::recv && request->started_at == 0);
  });
}

void Dispatch::close(const Interrupted& interrupted,
                     std::optional<std::chrono::nanoseconds> patience) {
  if (is_in_fork()) return;
  std::exception_ptr error;
  const auto attempt = [&](auto&& body) {
    try {
      body();
    } catch (const PipeCommException&) {
      if (!error) error = std::current_exception();
    } catch (...) {
      error = std::current_exception();
      // Peers that wait for pending messages must learn that these will not come.
      abort("its close() was interrupted");
    }
  };
  const auto wait_until_idle = [&](auto& queue) {
    while (!queue.wait_until_idle(Clock::now() + 5 * kTick))
      if (interrupted) interrupted();
  };
  attempt([&] {
    for (const auto& sequencer : sequencers_) wait_until_idle(*sequencer);
  });
  std::vector<OperationPtr> pending;
  FailurePtr failed_before;
  {
    std::lock_guard post_lock(post_mutex_);
    std::lock_guard lock(mutex_);
    if (state_ >= CommunicatorState::closing) return;
    enter(CommunicatorState::closing);
    failed_before = failure_;
    pending = in_flight();
  }
  std::erase_if(pending, [](const auto& operation) { return operation->is_on_device(); });
  // The thread that failed it may not have told all peers yet; they must get the failure first.
  if (failed_before) tell_peers(*failed_before);
  attempt([&] { events_->finish(interrupted); });
  events_->end(true);
  // Remaining messages of collectives must be posted before this rank announces its end.
  if (line_ && !failed_before && !error) attempt([&] { wait_until_idle(*line_); });
  if (line_) line_->stop();
  transport_->begin_close();
  const Deadline patient_until = patience ? Clock::now() + *patience : Deadline::max();
  for (const OperationPtr& operation : pending) {
    if (failed_before || operation->failure_seen()) continue;
    attempt([&] {
      Deadline until = patient_until;
      while (!wait(*operation, until, interrupted) && !has_only_receives(*operation))
        until = Clock::now() + 5 * kTick;
    });
  }
  pending.clear();
  end();
  if (error) std::rethrow_exception(error);
}

// After the transport is closed, nothing can complete the operations that are still pending.
void Dispatch::end() {
  transport_->close(Clock::now() + kGoodbyeLimit);
  std::vector<OperationPtr> pending;
  {
    std::lock_guard lock(mutex_);
    enter(CommunicatorState::closed);
    stop_watching_ = true;
    pending = in_flight();
    in_flight_.clear();
  }
  wake_watchdog_.notify_all();
  watchdog_.join();
  for (const OperationPtr& operation : pending) {
    if (operation->done()) continue;
    const std::string name = op_name(operation->op());
    const auto failure = std::make_shared<Failure>(own_failure(
        FailureKind::aborted, name + " was pending when its communicator was closed", name));
    operation->fail(failure_for(failure, *operation));
  }
  sequencers_.clear();
}

}  // namespace pipecomm
