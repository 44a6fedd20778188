// The device communicator after the launch: waiting for operations, watching them, failing, ending.
#include <algorithm>
#include <iterator>

#include "engine/device/device_communicator.h"
#include "message/start_thread.h"

namespace pipecomm {
namespace {

constexpr auto kTick = std::chrono::milliseconds(10);
constexpr auto kSyncPoll = std::chrono::microseconds(20);
constexpr auto kInterruptPoll = std::chrono::milliseconds(50);
// An error of NCCL's network names no rank; the control plane, which does, gets this long to notice
// a dead peer first.
constexpr auto kNamingLimit = std::chrono::seconds(1);
// How long a refusal may go unheard by ranks that have run the same collective before.
constexpr auto kRefusalLimit = std::chrono::seconds(5);

bool blames_network(const NcclError& error) {
  return error.result() == NcclResult::remote_error || error.result() == NcclResult::system_error;
}

}  // namespace

// ------------------------------------------------------------------------------------------------
// waiting

std::vector<Flight> DeviceCommunicator::flights() const {
  if (is_in_fork()) return {};
  std::vector<Flight> flights = in_flight_->flights();
  std::vector<Flight> control = control_->flights();
  std::move(control.begin(), control.end(), std::back_inserter(flights));
  return flights;
}

void DeviceCommunicator::wait(DeviceOperation& operation) {
  control_->check_process();
  if (!operation.done && control_->failure()) throw_failure();
  const StreamHandle current = runtime_->current_stream();
  const uint64_t capture = runtime_->capture_of(current);
  if (operation.is_captured()) {
    // The graph holds the order, and outside of it there is nothing to wait for.
    if (operation.capture != capture) return;
  } else if (capture != 0) {
    if (in_flight_->poll(operation)) return;
    throw std::invalid_argument(std::string("wait() inside a CUDA graph capture for a ") +
                                op_name(operation.op) +
                                " that was posted before it; wait before the capture begins");
  }
  if (operation.is_async || current != operation.caller)
    for (const auto& end : operation.ends) runtime_->wait(current, end.event);
  // The caller's stream is now ordered behind the last use of the tensors, and their memory is
  // allocated next on that stream. For any other stream the host has to see the end.
  if (current == operation.caller && !operation.is_captured()) operation.release();
  in_flight_->sweep();
}

bool DeviceCommunicator::synchronize(DeviceOperation& operation, Deadline until,
                                     const Interrupted& interrupted) {
  control_->check_process();
  Clock::time_point next_interrupt = Clock::now() + kInterruptPoll;
  while (!is_completed(operation)) {
    if (control_->failure()) throw_failure();
    const auto now = Clock::now();
    if (now >= until) return false;
    if (now >= next_interrupt) {
      interrupted();
      next_interrupt = now + kInterruptPoll;
    }
    std::this_thread::sleep_for(kSyncPoll);
  }
  if (control_->failure() && !operation.done) throw_failure();
  return true;
}

bool DeviceCommunicator::is_completed(DeviceOperation& operation) {
  if (operation.is_captured())
    throw std::invalid_argument(std::string(op_name(operation.op)) +
                                " was captured in a CUDA graph: it runs when the graph does, and "
                                "has no end of its own");
  if (is_in_fork()) return operation.done;
  if (!in_flight_->poll(operation)) return control_->failure() != nullptr;
  operation.release();
  return true;
}

// ------------------------------------------------------------------------------------------------
// failing

void DeviceCommunicator::fail_mismatch(const MessageCheck::Mismatch& mismatch) {
  const bool sends = mismatch.direction == Direction::send;
  Failure failure{.kind = FailureKind::mismatch, .rank = rank()};
  name_message(failure, mismatch.peer, mismatch.ours);
  failure.origin_rank = sends ? mismatch.peer : rank();
  failure.message = message_text(mismatch.direction, mismatch.peer, mismatch.ours) +
                    (sends ? " carries " : " expects ") + mismatch.ours.text() + ", but rank " +
                    std::to_string(mismatch.peer) + (sends ? " expects " : " sends ") +
                    mismatch.theirs.text() +
                    "; the transfer was under way, so what was received is not to be trusted";
  control_->fail(std::move(failure));
}

void DeviceCommunicator::fail_expired(const DeviceOperation& operation) {
  const auto& messages = operation.messages;
  fail_expired(operation.op, "", "call the matching operation",
               messages.empty() ? nullptr : &messages.front(), Clock::now() - operation.posted_at,
               operation.deadline - operation.posted_at);
}

void DeviceCommunicator::fail_expired(const Replays::Late& late) {
  fail_expired(late.op, " in a replay of a CUDA graph", "replay their graphs as often",
               late.first_message ? &*late.first_message : nullptr, late.running_for,
               *options_.timeout);
}

void DeviceCommunicator::fail_expired(OpCode op, const std::string& where,
                                      const std::string& remedy, const FlightMessage* shown,
                                      Clock::duration elapsed, Clock::duration limit) {
  Failure failure{
      .kind = FailureKind::timeout, .op = op_name(op), .rank = rank(), .origin_rank = rank()};
  failure.message = op_name(op) + where + " timed out on the device after " +
                    seconds_text(elapsed) + " (limit " + seconds_text(limit) + ")";
  if (op == OpCode::p2p && shown) {
    name_message(failure, shown->peer, shown->descriptor);
    failure.message += "; its first message is " +
                       message_text(shown->direction, shown->peer, shown->descriptor) + " of " +
                       shown->descriptor.text();
  }
  failure.message += "; check that the other ranks " + remedy + ", or raise timeout=";
  control_->fail(std::move(failure));
}

void DeviceCommunicator::fail_enqueue(OpCode op, const std::exception& error) {
  const auto* const nccl_error = dynamic_cast<const NcclError*>(&error);
  const bool is_peer = nccl_error && blames_network(*nccl_error);
  const Deadline until = Clock::now() + kNamingLimit;
  while (is_peer && !control_->failure() && Clock::now() < until)
    std::this_thread::sleep_for(kTick);
  control_->fail({.kind = is_peer ? FailureKind::peer_lost : FailureKind::error,
                  .message = std::string(op_name(op)) + " could not be enqueued: " + error.what(),
                  .op = op_name(op),
                  .rank = rank(),
                  .origin_rank = rank()});
}

// ------------------------------------------------------------------------------------------------
// watching

void DeviceCommunicator::watch() {
  std::unique_lock lock(mutex_);
  while (!stop_watch_.wait_for(lock, kTick, [this] { return stop_watching_; })) {
    lock.unlock();
    if (control_->failure())
      abort_nccl();
    else
      watch_once();
    lock.lock();
  }
}

void DeviceCommunicator::watch_once() {
  std::vector<Failure> failures;
  {
    std::lock_guard lock(mutex_);
    std::erase_if(pending_, [&](const Pending& pending) {
      if (pending.operation->done()) {
        const FailurePtr failure = pending.operation->failure();
        if (failure && !pending.failure_if_unheard) failures.push_back(*failure);
        return true;
      }
      if (!pending.failure_if_unheard || Clock::now() - pending.since < kRefusalLimit) return false;
      failures.push_back(*pending.failure_if_unheard);
      return true;
    });
  }
  for (const DeviceOperationPtr& operation : in_flight_->late()) fail_expired(*operation);
  if (const auto late = replays_.late()) fail_expired(*late);
  for (Failure& failure : failures) control_->fail(std::move(failure));
  check_unmatched();

  if (!nccl_) return;
  try {
    nccl_->poll();
    nccl_error_since_.reset();
  } catch (const NcclError& error) {
    const bool is_peer = blames_network(error);
    if (!nccl_error_since_) nccl_error_since_ = Clock::now();
    if (is_peer && Clock::now() - *nccl_error_since_ < kNamingLimit) return;
    control_->fail({.kind = is_peer ? FailureKind::peer_lost : FailureKind::error,
                    .message = error.what(),
                    .rank = rank(),
                    .origin_rank = rank()});
  }
}

}  // namespace pipecomm
