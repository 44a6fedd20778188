// Operations of a DeviceExecution after the launch: waiting, watching, failing, the shutdown.
#include <algorithm>
#include <future>

#include "engine/device/device_execution.h"
#include "message/start_thread.h"

namespace pipecomm {
namespace {

constexpr auto kNamingPoll = std::chrono::milliseconds(10);
constexpr auto kSyncPoll = std::chrono::microseconds(20);
constexpr auto kAssistLimit = std::chrono::milliseconds(20);
// A network error of NCCL does not name a rank; the control plane does, and gets this long to
// notice a dead peer first.
constexpr auto kNamingLimit = std::chrono::seconds(1);

constexpr const char* kGraphHint =
    "; destroy the CUDA graphs that hold operations of this communicator before it is closed";
constexpr const char* kConnectHint = "; NCCL_DEBUG=INFO shows what it tried";

bool blames_network(NcclResult result) {
  return result == NcclResult::remote_error || result == NcclResult::system_error;
}

}  // namespace

// ------------------------------------------------------------------------------------------------
// waiting

// Whether work that is enqueued now, in this capture or outside of any (0), has to wait for the ends
// of an earlier operation. Throws its failure.
bool DeviceExecution::must_follow(DeviceOperation& earlier, uint64_t capture, const char* call) {
  if (!earlier.done() && dispatch_.failure()) throw_failure(dispatch_);
  if (const FailurePtr failure = earlier.failure()) throw PipeCommException(failure);
  // The graph itself keeps the order, and outside of it there is no work to wait for.
  if (earlier.is_captured()) return earlier.capture == capture;
  if (capture == 0) return true;
  if (earlier.done() || in_flight_->has_ended(earlier)) return false;
  throw std::invalid_argument(std::string(call) + " inside a CUDA graph capture for a " +
                              op_name(earlier.op()) +
                              " that was posted before it; wait before the capture begins");
}

bool DeviceExecution::follow(Operation& any) {
  if (!any.is_on_device()) return false;
  auto& operation = static_cast<DeviceOperation&>(any);
  const StreamHandle current = runtime_->current_stream();
  if (!must_follow(operation, runtime_->capture_of(current), "wait()")) return true;
  if (operation.is_async || current != operation.caller)
    for (const auto& end : operation.ends) runtime_->wait(current, end.event);
  // The caller's stream is now ordered after the last use of the tensors, and their memory is
  // allocated next on that stream. For any other stream, the host must observe the end.
  if (current == operation.caller) operation.let_go();
  in_flight_->sweep();
  return true;
}

bool DeviceExecution::poll(Operation& operation) {
  if (!operation.is_on_device()) return operation.done();
  auto& on_device = static_cast<DeviceOperation&>(operation);
  if (on_device.is_captured())
    throw std::invalid_argument(std::string(op_name(operation.op())) +
                                " was captured in a CUDA graph: it runs when the graph does, and "
                                "has no end of its own");
  return in_flight_->poll(on_device);
}

// A waiting thread polls more often than the thread that watches all operations.
bool DeviceExecution::assist(Operation& operation) {
  if (!operation.is_on_device()) return dispatch_.transport().assist(operation);
  for (const Deadline until = Clock::now() + kAssistLimit; !poll(operation);) {
    if (Clock::now() >= until) return false;
    std::this_thread::sleep_for(kSyncPoll);
  }
  return true;
}

bool DeviceExecution::is_late(const Operation& operation) const {
  return operation.is_on_device() ? in_flight_->is_late(operation) : Execution::is_late(operation);
}

// ------------------------------------------------------------------------------------------------
// failing

void DeviceExecution::expire(const Operation& operation) {
  const auto& messages = static_cast<const DeviceOperation&>(operation).messages;
  fail_expired(operation.op(), "", "call the matching operation",
               messages.empty() ? nullptr : &messages.front(), Clock::now() - operation.posted_at(),
               operation.deadline() - operation.posted_at());
}

void DeviceExecution::fail_expired(const Replays::Late& late) {
  fail_expired(late.op, " in a replay of a CUDA graph", "replay their graphs as often",
               late.first_message ? &*late.first_message : nullptr, late.running_for, *timeout_);
}

void DeviceExecution::fail_expired(OpCode op, const std::string& where, const std::string& remedy,
                                   const FlightMessage* shown, Clock::duration elapsed,
                                   Clock::duration limit) {
  Failure failure =
      dispatch_.own_failure(FailureKind::timeout,
                            op_name(op) + where + " timed out on the device after " +
                                seconds_text(elapsed) + " (limit " + seconds_text(limit) + ")",
                            op_name(op));
  if (op == OpCode::p2p && shown) {
    name_message(failure, shown->peer, shown->descriptor);
    failure.message += "; its first message is " +
                       message_text(shown->direction, shown->peer, shown->descriptor) + " of " +
                       shown->descriptor.text();
  }
  int num_blocks = 0;
  for (const DeviceOperationPtr& operation : in_flight_->all())
    if (!operation->has_ended()) num_blocks += operation->num_blocks;
  if (const int room = runtime_->num_multiprocessors(); num_blocks > room)
    failure.message += "; operations in flight have " + std::to_string(num_blocks) +
                       " thread blocks, and the device has " + std::to_string(room) +
                       " multiprocessors, so sends may wait for receives that were posted before "
                       "them: put messages that depend on each other in one batch";
  failure.message += "; check that the other ranks " + remedy + ", or increase timeout=";
  failure.message += kFlightHint;
  dispatch_.fail(std::move(failure));
}

void DeviceExecution::fail_enqueue(OpCode op, const std::exception& error) {
  const auto* const of_nccl = dynamic_cast<const NcclError*>(&error);
  fail_posting(op, std::string(" could not be enqueued: ") + error.what(),
               of_nccl && blames_network(of_nccl->result));
}

void DeviceExecution::fail_connecting(OpCode op, const LinkError& error) {
  fail_posting(op, ": connecting NCCL failed: " + error.text + kConnectHint,
               blames_network(error.result));
}

void DeviceExecution::fail_posting(OpCode op, const std::string& why, bool is_peer) {
  const Deadline until = Clock::now() + kNamingLimit;
  while (is_peer && !dispatch_.failure() && Clock::now() < until)
    std::this_thread::sleep_for(kNamingPoll);
  fail(is_peer ? FailureKind::peer_lost : FailureKind::error, std::string(op_name(op)) + why,
       op_name(op));
}

// ------------------------------------------------------------------------------------------------
// watching

bool DeviceExecution::tick() {
  std::lock_guard lock(tick_mutex_);
  if (!is_looking_) return false;
  if (dispatch_.failure())
    abort_nccl();
  else
    look_for_trouble();
  return true;  // keeps ticking: replays and NCCL errors need no operation in flight
}

void DeviceExecution::look_for_trouble() {
  if (const auto late = replays_.late()) fail_expired(*late);
  checks_.fail_unmatched();

  if (!nccl_) return;
  const auto link_error = links_->error(has_closed());
  std::string text;
  NcclResult result = NcclResult::success;
  try {
    nccl_->poll();
  } catch (const NcclError& error) {
    result = error.result;
    text = error.what();
  }
  if (link_error) {
    result = link_error->result;
    text = "connecting NCCL failed: " + link_error->text + kConnectHint;
  }
  if (result == NcclResult::success) return nccl_error_since_.reset();
  const bool is_peer = blames_network(result);
  if (!nccl_error_since_) nccl_error_since_ = Clock::now();
  if (is_peer && Clock::now() - *nccl_error_since_ < kNamingLimit) return;
  fail(is_peer ? FailureKind::peer_lost : FailureKind::error, text);
}

// ------------------------------------------------------------------------------------------------
// the shutdown; every wait has a limit, since NCCL's calls block on ranks, graphs and the driver

// Over a network NCCL may hold a message on this host until its receiver takes it, and a shutdown
// would lose it. The receiver has up to its timeout to take it.
Deadline DeviceExecution::patience_with_peers() const {
  const Deadline least = Clock::now() + options_.end_limit;
  Clock::time_point sent_at = nccl_->sent_over_network_at();
  if (sent_at == Clock::time_point::min()) return least;
  if (checks_.has_captured()) sent_at = Clock::now();  // the time of the last replay is unknown
  if (!timeout_) return Deadline::max();
  return std::max(least, sent_at + std::chrono::duration_cast<Clock::duration>(*timeout_));
}

// Waits until the other ranks of all links have nothing in flight. False if that takes too long.
bool DeviceExecution::meet(const Interrupted& interrupted) {
  const Deadline limit = patience_with_peers();
  const auto keeps_waiting = [&] {
    if (interrupted) interrupted();
    return !dispatch_.failure() && Clock::now() < limit;
  };
  return links_->meet(keeps_waiting, has_closed()) && !dispatch_.failure();
}

// Runs `body` on a detached thread, which is left behind if it is stuck; `body` owns what it needs.
std::future<void> DeviceExecution::run_apart(std::function<void()> body) const {
  const auto task = std::make_shared<std::packaged_task<void()>>(std::move(body));
  try {
    const auto run = [runtime = runtime_, task] {
      try {
        runtime->adopt_thread();
      } catch (const std::exception&) {
        // The device has failed; NCCL must be shut down all the same.
      }
      (*task)();
    };
    start_thread(run, rank()).detach();
  } catch (const PipeCommException&) {
    (*task)();
  }
  return task->get_future();
}

void DeviceExecution::abort_nccl() {
  if (nccl_ && !aborted_.valid()) aborted_ = run_apart([nccl = nccl_] { nccl->abort(); });
}

void DeviceExecution::stop_looking() {
  {
    std::lock_guard lock(tick_mutex_);
    is_looking_ = false;
  }
  in_flight_->stop();
}

void DeviceExecution::finish(const Interrupted& interrupted) {
  links_->refuse_more();
  checks_.send_closing();
  if (!dispatch_.failure())
    for (const DeviceOperationPtr& operation : in_flight_->all())
      dispatch_.wait(*operation, Deadline::max(), interrupted);
  stop_looking();
  all_have_come_ = nccl_ && !dispatch_.failure() && meet(interrupted);
}

void DeviceExecution::end(bool in_order) {
  links_->refuse_more();
  stop_looking();
  const auto is_late = [](const std::future<void>& ended, std::chrono::nanoseconds limit) {
    return ended.wait_for(limit) != std::future_status::ready;
  };
  const std::string hint = checks_.has_captured() ? kGraphHint : "";
  const bool aborts = !in_order || dispatch_.failure();
  bool abort_is_stuck = false;
  if (nccl_ && aborts) {
    abort_nccl();
    abort_is_stuck = is_late(aborted_, options_.end_limit);
    if (abort_is_stuck)
      end_warning_ = "NCCL could not be aborted within " + seconds_text(options_.end_limit) +
                     ": its kernels may still run, and the tensors of operations in flight are "
                     "kept until the process ends" +
                     hint;
  } else if (nccl_) {
    const auto ended = run_apart([nccl = nccl_] { nccl->finish(); });
    // No warning without graphs: ranks of other links may be the cause of the delay.
    if (all_have_come_ && is_late(ended, options_.end_limit) && checks_.has_captured())
      end_warning_ = "NCCL did not end within " + seconds_text(options_.end_limit) +
                     ": its memory on the device stays in use until it does" + hint;
  }
  links_->stop_sending();
  in_flight_->abandon(abort_is_stuck);
}

}  // namespace pipecomm
