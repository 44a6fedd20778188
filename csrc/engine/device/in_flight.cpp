#include "engine/device/in_flight.h"

#include <algorithm>
#include <limits>

#include "message/start_thread.h"

namespace pipecomm {
namespace {

constexpr auto kTick = std::chrono::milliseconds(10);
// For so many ticks the thread looks in vain before it sleeps until it is woken, since that costs
// the caller more than all the rest of a small operation.
constexpr int kMaxIdleTicks = 100;
// After a deadline, how long the device has to answer whether the operation is done.
constexpr auto kAnswerLimit = std::chrono::milliseconds(500);
constexpr auto kStopLimit = std::chrono::seconds(1);
// How many operations a thread of the user looks at in passing.
constexpr size_t kMaxSwept = 16;

}  // namespace

void InFlight::start() {
  std::packaged_task<void()> task([self = shared_from_this()] { self->look(); });
  ended_ = task.get_future();
  thread_ = start_thread(std::move(task), control_->rank());
}

void InFlight::stop() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  if (!thread_.joinable()) return;
  const std::future<void> ended = std::move(ended_);  // which holds the task, and that this object
  if (ended.wait_for(kStopLimit) == std::future_status::ready)
    thread_.join();
  else
    thread_.detach();
}

void InFlight::look() {
  runtime_->adopt_thread();
  std::unique_lock lock(mutex_);
  for (int num_idle_ticks = 0; !stopping_;) {
    if (operations_.empty() && ++num_idle_ticks > kMaxIdleTicks) {
      is_asleep_ = true;
      changed_.wait(lock, [this] { return stopping_ || !operations_.empty(); });
      is_asleep_ = false;
    }
    if (!operations_.empty()) {
      num_idle_ticks = 0;
      lock.unlock();
      const Clock::time_point begin = Clock::now();
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
    operations_.push_back(operation);
    if (!is_asleep_) return;
  }
  changed_.notify_all();
}

// An aborted NCCL kernel leaves its stream without an error, so events that are done after a
// failure mean nothing.
bool InFlight::poll(DeviceOperation& operation) {
  if (operation.done) return true;
  try {
    for (const auto& end : operation.ends)
      if (!runtime_->is_done(end.event)) return false;
  } catch (const std::exception& error) {  // of the device: nothing on it works any more
    control_->fail({.message = error.what(),
                    .op = op_name(operation.op),
                    .rank = control_->rank(),
                    .origin_rank = control_->rank()});
  }
  if (control_->failure()) return false;
  if (!operation.done.exchange(true)) write_down(operation, nullptr);
  return true;
}

// On a thread that captures, memory that goes back to the device's allocator could upset the graph.
void InFlight::sweep() {
  if (!runtime_->is_capturing(runtime_->current_stream())) sweep_first(kMaxSwept);
}

// The device is asked without the lock, and not about what comes behind unfinished work on a stream.
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
    if (operation->done || (!is_behind && poll(*operation))) continue;
    for (const auto& end : operation->ends) busy.push_back(end.stream);
  }
  std::vector<DeviceOperationPtr> finished;
  {
    std::lock_guard lock(mutex_);
    std::erase_if(operations_, [&](DeviceOperationPtr& operation) {
      if (operation->done) finished.push_back(operation);
      return bool(operation->done);
    });
  }
  for (const DeviceOperationPtr& operation : finished) operation->release();
}

std::vector<DeviceOperationPtr> InFlight::all() const {
  std::lock_guard lock(mutex_);
  return {operations_.begin(), operations_.end()};
}

std::vector<DeviceOperationPtr> InFlight::late() const {
  const Clock::time_point now = Clock::now();
  std::vector<DeviceOperationPtr> late;
  std::lock_guard lock(mutex_);
  for (const DeviceOperationPtr& operation : operations_) {
    const Deadline deadline = operation->deadline;
    if (now < deadline) break;
    if (!operation->done && (looked_at_ >= deadline || now - deadline >= kAnswerLimit))
      late.push_back(operation);
  }
  return late;
}

void InFlight::abandon(const FailurePtr& failure, bool kernels_may_run) {
  static std::mutex kept_mutex;
  static auto* const kept = new std::vector<DeviceOperationPtr>;
  std::deque<DeviceOperationPtr> operations;
  {
    std::lock_guard lock(mutex_);
    operations.swap(operations_);
  }
  for (const DeviceOperationPtr& operation : operations)
    if (failure && !operation->done) write_down(*operation, failure);
  if (!kernels_may_run) return;
  std::lock_guard lock(kept_mutex);
  kept->insert(kept->end(), operations.begin(), operations.end());
}

// The recorded end is when the host saw it; the device came to it some time before.
void InFlight::write_down(const DeviceOperation& operation, FailurePtr failure) {
  FlightOperation flight = operation.flight();
  flight.ended = true;
  flight.ended_at = Clock::now();
  flight.failure = std::move(failure);
  record_.add(flight, [&](size_t idx) {
    FlightMessage message = operation.messages[idx];
    message.state = flight.failure ? MessageState::posted : MessageState::done;
    return message;
  });
}

std::vector<Flight> InFlight::flights() const {
  std::vector<Flight> pending;
  {
    std::lock_guard lock(mutex_);
    for (const DeviceOperationPtr& operation : operations_)
      if (!operation->done) pending.push_back({operation->flight(), operation->messages});
  }
  return merge_flights(std::move(pending), record_.ended());
}

}  // namespace pipecomm
