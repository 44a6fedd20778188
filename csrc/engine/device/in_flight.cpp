#include "engine/device/in_flight.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <string>

#include "message/start_thread.h"

namespace pipecomm {
namespace {

constexpr auto kTick = std::chrono::milliseconds(10);
// After this many ticks without operations, the thread sleeps until it is woken. Not earlier, since
// waking it costs the caller more than the rest of a small operation.
constexpr int kMaxIdleTicks = 100;
// How long after a deadline the device may take to answer whether the operation is done.
constexpr auto kAnswerLimit = std::chrono::milliseconds(500);
constexpr auto kStopLimit = std::chrono::seconds(1);
// How many operations a thread of the user polls in passing.
constexpr size_t kMaxSwept = 16;

}  // namespace

void InFlight::start(int rank) {
  std::packaged_task<void()> task([self = shared_from_this()] { self->look(); });
  ended_ = task.get_future();
  thread_ = start_thread(std::move(task), rank);
}

void InFlight::stop() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  {
    std::lock_guard lock(dispatch_mutex_);
    dispatch_ = nullptr;
  }
  if (!thread_.joinable()) return;
  const std::future<void> ended = std::move(ended_);  // keeps the task, and so this object, alive
  if (ended.wait_for(kStopLimit) == std::future_status::ready)
    thread_.join();
  else
    thread_.detach();
}

void InFlight::look() {
  runtime_->adopt_thread();
  std::unique_lock lock(mutex_);
  for (int num_idle_ticks = 0; !stopping_;) {
    if (is_idle() && ++num_idle_ticks > kMaxIdleTicks) {
      is_asleep_ = true;
      changed_.wait(lock, [this] { return stopping_ || !is_idle(); });
      is_asleep_ = false;
    }
    if (!is_idle()) {
      num_idle_ticks = 0;
      lock.unlock();
      const Clock::time_point begin = Clock::now();
      drop_captured();
      sweep_first(std::numeric_limits<size_t>::max());
      lock.lock();
      looked_at_ = begin;
    }
    changed_.wait_for(lock, kTick, [this] { return stopping_; });
  }
}

void InFlight::add(const DeviceOperationPtr& operation) {
  {
    std::lock_guard lock(mutex_);
    if (operation->is_captured())
      captured_[operation->capture].push_back(operation);
    else
      operations_.push_back(operation);
    if (!is_asleep_) return;
  }
  changed_.notify_all();
}

// The lanes of an operation take part in its capture until that ends. A device that has failed
// captures nothing.
void InFlight::drop_captured() {
  std::vector<std::pair<uint64_t, StreamHandle>> asked;
  {
    std::lock_guard lock(mutex_);
    for (const auto& [capture, operations] : captured_)
      asked.emplace_back(capture, operations.front()->ends.front().stream);
  }
  for (const auto& [capture, stream] : asked) {
    try {
      if (runtime_->capture_of(stream) == capture) continue;
    } catch (const std::exception&) {
    }
    std::vector<DeviceOperationPtr> ended;  // destroyed without the lock
    std::lock_guard lock(mutex_);
    ended.swap(captured_[capture]);
    captured_.erase(capture);
  }
}

// An aborted NCCL kernel leaves its stream without an error, so completed events prove nothing
// after a failure.
bool InFlight::has_ended(DeviceOperation& operation) {
  std::optional<std::string> broken;
  try {
    for (const auto& end : operation.ends)
      if (!runtime_->is_done(end.event)) return false;
  } catch (const std::exception& error) {  // a device error: nothing on it works any more
    broken = error.what();
  }
  std::lock_guard lock(dispatch_mutex_);
  if (!dispatch_) return false;
  if (broken)
    dispatch_->fail(dispatch_->own_failure(FailureKind::error, *broken, op_name(operation.op())));
  return !dispatch_->failure();
}

bool InFlight::poll(DeviceOperation& operation) {
  if (!operation.done() && has_ended(operation)) operation.end();
  return operation.done();
}

// Does nothing on a capturing thread, where freeing device memory could disturb the graph.
void InFlight::sweep() {
  if (!runtime_->is_capturing(runtime_->current_stream())) sweep_first(kMaxSwept);
}

// Polls without the lock, and skips operations that follow unfinished ones on a stream.
void InFlight::sweep_first(size_t max_asked) {
  std::vector<DeviceOperationPtr> asked;
  {
    std::lock_guard lock(mutex_);
    const size_t num_asked = std::min(max_asked, operations_.size());
    asked.assign(operations_.begin(), operations_.begin() + std::ptrdiff_t(num_asked));
  }
  std::vector<StreamHandle> busy;
  for (const DeviceOperationPtr& operation : asked) {
    const bool is_behind = std::ranges::any_of(operation->ends, [&](const auto& end) {
      return std::ranges::find(busy, end.stream) != busy.end();
    });
    if (operation->done() || (!is_behind && poll(*operation))) continue;
    for (const auto& end : operation->ends) busy.push_back(end.stream);
  }
  std::vector<DeviceOperationPtr> ended;  // destroyed without the lock
  std::lock_guard lock(mutex_);
  std::erase_if(operations_, [&](const DeviceOperationPtr& operation) {
    if (operation->has_ended()) ended.push_back(operation);
    return operation->has_ended();
  });
}

std::vector<DeviceOperationPtr> InFlight::all() const {
  std::lock_guard lock(mutex_);
  return {operations_.begin(), operations_.end()};
}

bool InFlight::is_late(const Operation& operation) const {
  const Clock::time_point now = Clock::now();
  const Deadline deadline = operation.deadline();
  std::lock_guard lock(mutex_);
  return now >= deadline && (looked_at_ >= deadline || now - deadline >= kAnswerLimit);
}

void InFlight::abandon(bool kernels_may_run) {
  static std::mutex kept_mutex;
  static auto* const kept = new std::vector<DeviceOperationPtr>;
  std::deque<DeviceOperationPtr> operations;
  decltype(captured_) captured;  // destroyed without the lock
  {
    std::lock_guard lock(mutex_);
    operations.swap(operations_);
    captured.swap(captured_);
  }
  if (!kernels_may_run) return;
  std::lock_guard lock(kept_mutex);
  kept->insert(kept->end(), operations.begin(), operations.end());
}

}  // namespace pipecomm
