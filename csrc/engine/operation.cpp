#include "engine/operation.h"

#include <algorithm>
#include <cstdio>

#include "plan/dtype.h"

namespace pipecomm {

std::string message_text(Direction direction, int peer, const Descriptor& descriptor) {
  const bool sends = direction == Direction::send;
  return (sends ? "send #" : "recv #") + std::to_string(descriptor.seq) + " on channel " +
         std::to_string(descriptor.channel) + (sends ? " to rank " : " from rank ") +
         std::to_string(peer);
}

std::string seconds_text(Clock::duration duration) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f s", std::chrono::duration<double>(duration).count());
  return text;
}

void name_message(Failure& failure, int peer, const Descriptor& descriptor) {
  failure.op = op_name(descriptor.op);
  failure.peer = peer;
  failure.channel = descriptor.channel;
  failure.seq = static_cast<int64_t>(descriptor.seq);
  failure.dtype = dtype_name(descriptor.dtype);
  const int num_dims = std::min<int>(descriptor.num_dims, kMaxDescriptorDims);
  failure.shape.assign(descriptor.shape.begin(), descriptor.shape.begin() + num_dims);
}

Request& Operation::add_request(Direction direction, int peer, const Descriptor& descriptor,
                                std::byte* data) {
  auto request = std::make_shared<Request>();
  request->direction = direction;
  request->peer = peer;
  request->descriptor = descriptor;
  request->data = data;
  requests_.push_back(std::move(request));
  return *requests_.back();
}

std::vector<RequestPtr> Operation::seal() {
  std::unique_lock lock(mutex_);
  num_pending_ = static_cast<int>(requests_.size());
  std::vector<RequestPtr> to_post = requests_;
  if (num_pending_ == 0) finish(lock);
  return to_post;
}

void Operation::settle(Request& request, FailurePtr failure) {
  if (request.settled.exchange(true)) return;
  if (request.operation) request.operation->settle_one(std::move(failure));
}

void Operation::settle_one(FailurePtr failure) {
  std::unique_lock lock(mutex_);
  if (done_) return;  // failed as a whole earlier
  if (failure && !failure_) failure_ = std::move(failure);
  if (--num_pending_ == 0) finish(lock);
}

// Runs the epilogue without the lock, then publishes the end. Resources go last, after waiters may
// run, and always without the lock: the end of a tensor may have to wait for Python.
void Operation::finish(std::unique_lock<std::mutex>& lock) {
  if (epilogue_ && !failure_) {
    auto epilogue = std::move(epilogue_);
    lock.unlock();
    FailurePtr failure;
    try {
      epilogue();
    } catch (const std::exception& error) {
      failure = std::make_shared<Failure>(
          Failure{.message = std::string("unpack failed: ") + error.what(), .op = op_name(op_)});
    }
    epilogue = nullptr;
    lock.lock();
    if (done_) return;
    if (failure) failure_ = std::move(failure);
  }
  const auto kept = std::move(kept_);
  const auto requests = std::move(requests_);
  const auto epilogue = std::move(epilogue_);
  done_.store(true, std::memory_order_release);
  settled_.notify_all();
  lock.unlock();
}

void Operation::fail(FailurePtr failure) {
  std::unique_lock lock(mutex_);
  if (done_) return;
  if (!failure_) failure_ = std::move(failure);
  // The transport may still hold the requests, which own this operation and so the memory in use:
  // keep `kept_`.
  const auto requests = std::move(requests_);
  const auto epilogue = std::move(epilogue_);
  done_.store(true, std::memory_order_release);
  settled_.notify_all();
  lock.unlock();
}

FailurePtr Operation::failure() const {
  std::lock_guard lock(mutex_);
  return failure_;
}

bool Operation::wait_until(Deadline until) {
  if (done()) return true;
  std::unique_lock lock(mutex_);
  return settled_.wait_until(lock, until, [this] { return done_.load(); });
}

std::vector<RequestPtr> Operation::requests() const {
  std::lock_guard lock(mutex_);
  return requests_;
}

RequestPtr Operation::first_pending() const {
  std::lock_guard lock(mutex_);
  for (const RequestPtr& request : requests_)
    if (!request->settled) return request;
  return nullptr;
}

std::string Operation::pending_text() const {
  std::lock_guard lock(mutex_);
  int num_sends = 0, num_recvs = 0;
  for (const RequestPtr& request : requests_) {
    if (request->settled) continue;
    ++(request->direction == Direction::send ? num_sends : num_recvs);
  }
  return std::to_string(num_sends) + " send, " + std::to_string(num_recvs) + " recv pending";
}

}  // namespace pipecomm
