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
constexpr auto kPoll = 50us;

}  // namespace

HostStaging::HostStaging(std::shared_ptr<DeviceRuntime> runtime)
    : runtime_(std::move(runtime)), stream_(runtime_->new_stream()) {}

StagedBatch HostStaging::stage(std::span<const PointToPoint> batch, const OwnMessages& own,
                               int rank, StagingPool& pool) {
  StagedBatch staged;
  std::vector<int64_t> offsets;
  int64_t end = 0;
  for (const PointToPoint& op : batch) {
    offsets.push_back(checked_align_up(end, kStagingAlignBytes));
    if (op.peer != rank) end = checked_add(offsets.back(), op.tensor.num_bytes());
  }
  staged.memory = pool.acquire(end);
  for (size_t idx = 0; idx < batch.size(); ++idx) {
    const auto& [direction, peer, channel, tensor, signature] = batch[idx];
    const bool travels = peer != rank && tensor.num_bytes() > 0;
    std::byte* const data = travels ? staged.memory.get() + offsets[idx] : nullptr;
    staged.data.push_back(data);
    if (!travels) continue;
    if (direction == Direction::send)
      staged.outgoing.add(tensor, data);
    else
      staged.incoming.add(data, tensor);
  }
  for (const auto& [send, recv] : own) staged.outgoing.add(send->tensor, recv->tensor);
  return staged;
}

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
      std::this_thread::sleep_for(kPoll);
  }
}

void HostStaging::execute(std::span<const CopyTask> tasks, const CopyBuffers& buffers,
                          const Scale& scale) {
  if (tasks.empty()) return;
  runtime_->execute(tasks, buffers, scale, stream_);
  wait(runtime_->record(stream_), nullptr);
}

}  // namespace pipecomm
