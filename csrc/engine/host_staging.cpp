#include "engine/host_staging.h"

#include <chrono>
#include <stdexcept>
#include <string>
#include <thread>

#include "plan/checked.h"

namespace pipecomm {
namespace {

using namespace std::chrono_literals;

// Sleeping takes longer than most copies.
constexpr auto kYieldLimit = 200us;
constexpr auto kPause = 50us;

}  // namespace

StagedBatch stage_batch(std::span<const PointToPoint> batch, const OwnMessages& own, int rank,
                        Staged which, StagingPool& pool) {
  const auto is_staged = [&](const PointToPoint& op) {
    return op.peer != rank && (which == Staged::all || !op.tensor.is_contiguous());
  };
  StagedBatch staged;
  std::vector<int64_t> offsets;
  int64_t end = 0;
  for (const PointToPoint& op : batch) {
    offsets.push_back(checked_align_up(end, kStagingAlignBytes));
    if (is_staged(op)) end = checked_add(offsets.back(), op.tensor.num_bytes());
  }
  staged.memory = pool.acquire(end);
  for (size_t idx = 0; idx < batch.size(); ++idx) {
    const PointToPoint& op = batch[idx];
    std::byte*& data = staged.data.emplace_back(nullptr);
    if (op.peer == rank || op.tensor.num_bytes() == 0) continue;
    data = is_staged(op) ? staged.memory.get() + offsets[idx] : op.tensor.data;
    if (data == op.tensor.data) continue;
    if (op.direction == Direction::send)
      staged.outgoing.add(op.tensor, contiguous_at(data, op.tensor));
    else
      staged.incoming.add(contiguous_at(data, op.tensor), op.tensor);
  }
  for (const auto& [send, recv] : own) staged.outgoing.add(send->tensor, recv->tensor);
  return staged;
}

HostStaging::HostStaging(std::shared_ptr<DeviceRuntime> runtime)
    : runtime_(std::move(runtime)), stream_(runtime_->new_stream()) {}

EventPtr HostStaging::work_of_caller(const char* op) {
  const StreamHandle caller = runtime_->current_stream();
  if (runtime_->is_capturing(caller))
    throw std::invalid_argument(
        std::string(op) +
        " cannot be captured in a CUDA graph: transport=\"tcp\" stages CUDA "
        "tensors through host memory; call it outside of the capture");
  return runtime_->record(caller);
}

void HostStaging::wait(const EventPtr& work, const std::function<void()>& keep_waiting) {
  const auto since = std::chrono::steady_clock::now();
  while (!runtime_->is_done(work)) {
    if (keep_waiting) keep_waiting();
    if (std::chrono::steady_clock::now() - since < kYieldLimit)
      std::this_thread::yield();
    else
      std::this_thread::sleep_for(kPause);
  }
}

void HostStaging::execute(std::span<const CopyTask> tasks, const CopyBuffers& buffers,
                          const Scale& scale) {
  if (tasks.empty()) return;
  runtime_->execute(tasks, buffers, scale, stream_);
  wait(runtime_->record(stream_), nullptr);
}

}  // namespace pipecomm
