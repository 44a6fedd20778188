// The end of a DeviceExecution. Nothing here waits without a limit: NCCL's calls return when all
// ranks of the node have come and no captured graph is alive, or when the driver lets them.
#include <algorithm>
#include <future>

#include "engine/device/device_execution.h"
#include "message/start_thread.h"

namespace pipecomm {
namespace {

constexpr const char* kGraphHint =
    "; destroy the CUDA graphs that hold operations of this communicator before it is closed";

}  // namespace

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

// ------------------------------------------------------------------------------------------------
// peers that close

// Over a network NCCL may hold a message on this host until its receiver takes it, and would lose it at
// the end. A receiver has its timeout for that.
Deadline DeviceExecution::patience_with_peers() const {
  const Deadline least = Clock::now() + options_.end_limit;
  Clock::time_point sent_at = nccl_->sent_over_network_at();
  if (sent_at == Clock::time_point::min()) return least;
  if (checks_.has_captured()) sent_at = Clock::now();  // nobody sees when a graph was replayed
  if (!timeout_) return Deadline::max();
  return std::max(least, sent_at + std::chrono::duration_cast<Clock::duration>(*timeout_));
}

// Until the ranks of all links have nothing in flight either. False if that takes too long.
bool DeviceExecution::meet(const Interrupted& interrupted) {
  const Deadline limit = patience_with_peers();
  const auto keeps_waiting = [&] {
    if (interrupted) interrupted();
    return !communicator_.failure() && Clock::now() < limit;
  };
  const auto has_closed = [this](int peer) { return communicator_.transport().has_closed(peer); };
  return links_->meet(keeps_waiting, has_closed) && !communicator_.failure();
}

// ------------------------------------------------------------------------------------------------
// the end of NCCL

// On a thread that owns what it needs, and is left behind if it is stuck.
std::future<void> DeviceExecution::run_apart(std::function<void()> body) const {
  const auto task = std::make_shared<std::packaged_task<void()>>(std::move(body));
  try {
    const auto run = [runtime = runtime_, task] {
      try {
        runtime->adopt_thread();
      } catch (const std::exception&) {
        // The device has failed, which must not keep NCCL from its end.
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
  if (!communicator_.failure())
    for (const DeviceOperationPtr& operation : in_flight_->all())
      communicator_.wait(*operation, Deadline::max(), interrupted);
  stop_looking();
  all_have_come_ = nccl_ && !communicator_.failure() && meet(interrupted);
}

void DeviceExecution::end(bool in_order) {
  links_->refuse_more();
  stop_looking();
  const auto is_late = [](const std::future<void>& ended, std::chrono::nanoseconds limit) {
    return ended.wait_for(limit) != std::future_status::ready;
  };
  const std::string hint = checks_.has_captured() ? kGraphHint : "";
  const bool aborts = !in_order || communicator_.failure();
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
    // Without graphs it may be the ranks of other links that hold up one of this rank.
    if (all_have_come_ && is_late(ended, options_.end_limit) && checks_.has_captured())
      end_warning_ = "NCCL did not end within " + seconds_text(options_.end_limit) +
                     ": its memory on the device stays in use until it does" + hint;
  }
  links_->stop_sending();
  in_flight_->abandon(abort_is_stuck);
}

}  // namespace pipecomm
