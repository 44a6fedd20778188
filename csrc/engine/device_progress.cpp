// The device communicator after the launch: waiting for operations, watching them, failing, ending.
#include <algorithm>
#include <future>
#include <iterator>

#include "engine/device_communicator.h"

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
constexpr auto kAbortLimit = std::chrono::seconds(10);
constexpr auto kCloseLimit = std::chrono::seconds(5);
// Unfinished operations that a sweep asks about: those behind them are mostly on the same streams.
constexpr size_t kMaxSwept = 4;

}  // namespace

// ------------------------------------------------------------------------------------------------
// waiting

// An aborted NCCL kernel leaves its stream without an error, so events that are done after a
// failure mean nothing.
bool DeviceCommunicator::poll_done(DeviceOperation& operation) {
  if (operation.done) return true;
  try {
    for (const EventPtr& end : operation.ends)
      if (!runtime_->is_done(end)) return false;
  } catch (const std::exception& error) {  // of the device: nothing on it works any more
    control_->fail({.message = error.what(),
                    .op = op_name(operation.op),
                    .rank = rank(),
                    .origin_rank = rank()});
  }
  if (control_->failure()) return false;
  note_done(operation);
  return true;
}

void DeviceCommunicator::note_done(DeviceOperation& operation) {
  if (!operation.done.exchange(true)) write_down(operation, nullptr);
}

// When the host sees the end: the device came to it some time before.
void DeviceCommunicator::write_down(const DeviceOperation& operation, FailurePtr failure) {
  FlightOperation flight = operation.flight();
  flight.ended = true;
  flight.ended_at = Clock::now();
  flight.failure = std::move(failure);
  flight_record_.add(flight, [&](size_t idx) {
    FlightMessage message = operation.messages[idx];
    message.state = flight.failure ? MessageState::posted : MessageState::done;
    return message;
  });
}

std::vector<Flight> DeviceCommunicator::flights() const {
  if (is_in_fork()) return {};
  std::vector<Flight> pending;
  {
    std::lock_guard lock(mutex_);
    for (const DeviceOperationPtr& operation : in_flight_)
      if (!operation->done) pending.push_back({operation->flight(), operation->messages});
  }
  std::vector<Flight> flights = merge_flights(std::move(pending), flight_record_.ended());
  std::vector<Flight> control = control_->flights();
  std::move(control.begin(), control.end(), std::back_inserter(flights));
  return flights;
}

// Drops what finished operations kept alive. On the threads of users only: memory that goes back to
// the device's allocator on another thread could upset a capture.
void DeviceCommunicator::sweep() {
  if (runtime_->is_capturing(runtime_->current_stream())) return;
  std::vector<DeviceOperationPtr> finished;
  {
    std::lock_guard lock(mutex_);
    size_t num_unfinished = 0;
    for (auto it = in_flight_.begin(); it != in_flight_.end() && num_unfinished < kMaxSwept;) {
      if (!poll_done(**it)) {
        ++num_unfinished;
        ++it;
        continue;
      }
      finished.push_back(std::move(*it));
      it = in_flight_.erase(it);
    }
  }
  for (const DeviceOperationPtr& operation : finished) operation->release();
}

void DeviceCommunicator::wait(DeviceOperation& operation) {
  if (!operation.done && control_->failure()) throw_failure();
  const StreamHandle current = runtime_->current_stream();
  const bool is_capturing = runtime_->is_capturing(current);
  if (operation.is_captured) {
    if (!is_capturing) return;  // the graph holds the order, and there is nothing to wait for
  } else if (is_capturing) {
    if (poll_done(operation)) return;
    throw std::invalid_argument(std::string("wait() inside a CUDA graph capture for a ") +
                                op_name(operation.op) +
                                " that was posted before it; wait before the capture begins");
  }
  if (operation.is_async || current != operation.caller)
    for (const EventPtr& end : operation.ends) runtime_->wait(current, end);
  // The caller's stream is now ordered behind the last use of the tensors, and whoever allocates
  // their memory next does so on that stream. For any other stream the host has to see the end.
  if (current == operation.caller && !operation.is_captured) operation.release();
  sweep();
}

bool DeviceCommunicator::synchronize(DeviceOperation& operation, Deadline until,
                                     const Interrupted& interrupted) {
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
  if (operation.is_captured)
    throw std::invalid_argument(std::string(op_name(operation.op)) +
                                " was captured in a CUDA graph: it runs when the graph does, and "
                                "has no end of its own");
  if (!poll_done(operation)) return control_->failure() != nullptr;
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
  Failure failure{.kind = FailureKind::timeout,
                  .op = op_name(operation.op),
                  .rank = rank(),
                  .origin_rank = rank()};
  failure.message = std::string(op_name(operation.op)) + " timed out on the device after " +
                    seconds_text(Clock::now() - operation.posted_at) + " (limit " +
                    seconds_text(operation.deadline - operation.posted_at) + ")";
  if (operation.op == OpCode::p2p && !operation.messages.empty()) {
    const FlightMessage& shown = operation.messages.front();
    name_message(failure, shown.peer, shown.descriptor);
    failure.message += "; its first message is " +
                       message_text(shown.direction, shown.peer, shown.descriptor) + " of " +
                       shown.descriptor.text();
  }
  failure.message += "; check that the other ranks call the matching operation, or raise timeout=";
  control_->fail(std::move(failure));
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
  std::vector<DeviceOperationPtr> late;
  std::vector<Failure> failures;
  {
    std::lock_guard lock(mutex_);
    for (const DeviceOperationPtr& operation : in_flight_) {
      if (Clock::now() < operation->deadline) break;
      late.push_back(operation);
    }
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
  for (const DeviceOperationPtr& operation : late)
    if (!poll_done(*operation)) fail_expired(*operation);
  for (Failure& failure : failures) control_->fail(std::move(failure));

  if (!nccl_) return;
  try {
    nccl_->poll();
    nccl_error_since_.reset();
  } catch (const NcclError& error) {
    const bool is_peer =
        error.result() == NcclResult::remote_error || error.result() == NcclResult::system_error;
    if (!nccl_error_since_) nccl_error_since_ = Clock::now();
    if (is_peer && Clock::now() - *nccl_error_since_ < kNamingLimit) return;
    control_->fail({.kind = is_peer ? FailureKind::peer_lost : FailureKind::error,
                    .message = error.what(),
                    .rank = rank(),
                    .origin_rank = rank()});
  }
}

// On a thread of its own that owns what it needs: an abort can be stuck in the CUDA driver for as
// long as another thread is, and then nobody else should be.
void DeviceCommunicator::abort_nccl() {
  if (!nccl_ || std::exchange(nccl_aborted_, true)) return;
  std::packaged_task<void()> task([nccl = nccl_] { nccl->abort(); });
  std::future<void> aborted = task.get_future();
  std::thread(std::move(task)).detach();
  aborted.wait_for(kAbortLimit);
}

void DeviceCommunicator::close(const Interrupted& interrupted) {
  if (closing_.exchange(true)) return;
  std::deque<DeviceOperationPtr> in_flight;
  {
    std::lock_guard launch_lock(launch_mutex_);  // a call that was under way has been published
    std::lock_guard lock(mutex_);
    in_flight = in_flight_;
  }
  const bool failed_before = control_->failure() != nullptr;
  FailurePtr failure;
  for (const DeviceOperationPtr& operation : in_flight) {
    if (failed_before) break;
    try {
      synchronize(*operation, Deadline::max(), interrupted);
    } catch (const PipeCommException& error) {
      failure = error.failure();
      break;
    }
  }
  {
    std::lock_guard lock(mutex_);
    stop_watching_ = true;
  }
  stop_watch_.notify_all();
  watchdog_.join();
  if (control_->failure())
    abort_nccl();
  else if (nccl_)
    nccl_->close(Clock::now() + kCloseLimit);
  if (const FailurePtr cause = control_->failure())
    for (const DeviceOperationPtr& operation : in_flight)
      if (!operation->done) write_down(*operation, cause);
  in_flight.clear();
  {
    std::lock_guard lock(mutex_);
    in_flight_.clear();
  }
  control_->close(interrupted);
  closed_ = true;
  if (failure) throw PipeCommException(failure);
}

}  // namespace pipecomm
