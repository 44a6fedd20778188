#include "engine/host_execution.h"

#include <algorithm>

#include "copy/copy_cpu.h"

namespace pipecomm {
namespace {

StagingPool pool_for(const std::shared_ptr<DeviceRuntime>& device) {
  if (!device) return StagingPool();
  return StagingPool([device](int64_t num_bytes) { return device->allocate_host(num_bytes); });
}

}  // namespace

HostExecution::HostExecution(int rank, int num_threads,
                             const std::shared_ptr<DeviceRuntime>& device)
    : rank_(rank),
      staging_(device ? std::make_unique<HostStaging>(device) : nullptr),
      pool_(pool_for(device)),
      threads_(num_threads) {}

EventPtr HostExecution::work_of_caller(OpCode op) {
  return staging_ ? staging_->work_of_caller(op_name(op)) : nullptr;
}

void HostExecution::wait(const EventPtr& caller, const std::function<void()>& keep_waiting) {
  if (staging_) staging_->wait(caller, keep_waiting);
}

void HostExecution::copy(std::span<const CopyTask> tasks, const CopyBuffers& buffers,
                         const Scale& scale) {
  if (tasks.empty()) return;
  if (staging_) return staging_->execute(tasks, buffers, scale);
  std::unique_lock lock(threads_mutex_, std::try_to_lock);
  execute_cpu(tasks, buffers, scale, lock ? &threads_ : nullptr);
}

std::shared_ptr<StagedBatch> HostExecution::stage(std::span<const PointToPoint> batch,
                                                  const OwnMessages& own) {
  if (staging_) return std::make_shared<StagedBatch>(HostStaging::stage(batch, own, rank_, pool_));
  for (const auto& [send, recv] : own)
    std::copy_n(send->tensor.data, send->tensor.num_bytes(), recv->tensor.data);
  return nullptr;
}

std::shared_ptr<HostExchange> HostExecution::exchange(
    std::shared_ptr<const LoweredExchange> lowered, std::span<const TensorRef> inputs,
    std::span<const TensorRef> outputs, bool copies_on_the_way) {
  auto made = std::make_shared<HostExchange>(*this, std::move(lowered),
                                             is_on_device() || !copies_on_the_way);
  for (const TensorRef& tensor : inputs) made->buffers_.inputs.push_back(tensor.data);
  for (const TensorRef& tensor : outputs) made->buffers_.outputs.push_back(tensor.data);
  return made;
}

void HostExchange::take_memory() {
  if (!stages_) return;
  buffers_.send_staging = execution_.pool_.acquire(lowered_->send_staging_bytes);
  buffers_.recv_staging = execution_.pool_.acquire(lowered_->recv_staging_bytes);
}

void HostExchange::begin() {
  execution_.copy(stages_ ? lowered_->pack_and_local() : lowered_->local(), buffers_.view(),
                  lowered_->scale);
  ++execution_.num_exchanges_;
  execution_.num_passes_ += lowered_->copy_passes();
}

void HostExchange::end() {
  if (stages_) execution_.copy(lowered_->unpack(), buffers_.view(), Scale{});
  // Back in the pool before waiters run, so that their next exchange finds it there.
  buffers_.send_staging.reset();
  buffers_.recv_staging.reset();
}

RequestPtr HostExchange::request(Direction direction, int peer, const Descriptor& descriptor,
                                 const LoweredMessage* message) {
  const bool sends = direction == Direction::send;
  const void* data = nullptr;
  std::shared_ptr<const MessageCopy> on_the_way;
  if (message && !message->is_staged())
    data = sends ? buffers_.inputs[message->tensor_idx] : buffers_.outputs[message->tensor_idx];
  else if (message && stages_)
    data = (sends ? buffers_.send_staging : buffers_.recv_staging).get();
  else if (message)
    on_the_way = std::make_shared<const MessageCopy>(
        MessageCopy{lowered_, message, {shared_from_this(), &buffers_}});
  auto* const bytes = static_cast<std::byte*>(const_cast<void*>(data));
  RequestPtr made =
      make_request(direction, peer, descriptor, bytes ? bytes + message->offset_bytes : nullptr);
  made->copy = std::move(on_the_way);
  return made;
}

std::vector<RequestPtr> HostExchange::requests(std::span<const PeerMessages> messages) {
  std::vector<RequestPtr> requests;
  requests.reserve(2 * messages.size());
  for (const PeerMessages& peer : messages)
    requests.push_back(request(Direction::recv, peer.peer, peer.recv, peer.lowered_recv));
  for (const PeerMessages& peer : messages)
    requests.push_back(request(Direction::send, peer.peer, peer.send, peer.lowered_send));
  return requests;
}

}  // namespace pipecomm
