#include "message/operation.h"

#include <algorithm>
#include <cstdio>

#include "message/flight_record.h"
#include "message/recycled.h"
#include "plan/dtype.h"

namespace pipecomm {

std::string message_text(Direction direction, int peer, const Descriptor& descriptor) {
  const bool sends = direction == Direction::send;
  if (descriptor.op != OpCode::p2p)  // channel and number mean nothing to the caller
    return (sends ? "the message to rank " : "the message from rank ") + std::to_string(peer);
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
  MessageDescription description = description_of(descriptor);
  failure.op = std::move(description.op);
  failure.peer = peer;
  failure.channel = descriptor.channel;
  failure.seq = static_cast<int64_t>(descriptor.seq);
  failure.dtype = std::move(description.dtype);
  failure.shape = std::move(description.shape);
}

MessageDescription description_of(const Descriptor& descriptor) {
  const int num_dims = std::min<int>(descriptor.num_dims, kMaxDescriptorDims);
  return {.op = op_name(descriptor.op),
          .dtype = std::string(dtype_name(descriptor.dtype)),
          .shape = {descriptor.shape.begin(), descriptor.shape.begin() + num_dims},
          .num_bytes = descriptor.num_bytes};
}

// The ranks of a collective may legally describe different tensors, so these explain nothing.
std::string disagreement_text(Direction direction, int peer, const Descriptor& ours,
                              const Descriptor& theirs) {
  const std::string other = ", but rank " + std::to_string(peer);
  if (ours.op != OpCode::p2p && theirs.op != OpCode::p2p)
    return "this rank calls " + ours.text() + other + " calls " + theirs.text() +
           (ours.op == theirs.op && ours.num_bytes == theirs.num_bytes
                ? " with other arguments (sizes, dims, dtypes, operator, source or root differ)"
                : "");
  const bool sends = direction == Direction::send;
  return message_text(direction, peer, ours) + (sends ? " carries " : " expects ") + ours.text() +
         other + (sends ? " expects " : " sends ") + theirs.text() +
         (ours.text() != theirs.text() ? ""
          : ours.num_dims > kMaxDescriptorDims
              ? " with other further dims, or as part of another list of tensors"
              : " as part of another list of tensors (their numbers differ)");
}

RequestPtr make_request(Direction direction, int peer, const Descriptor& descriptor,
                        std::byte* data) {
  auto request = std::allocate_shared<Request>(Recycled<Request>());
  request->direction = direction;
  request->peer = peer;
  request->descriptor = descriptor;
  request->data = data;
  return request;
}

Operation::Operation(OpCode op, Deadline deadline)
    : op_(op), posted_at_(Clock::now()), deadline_(deadline), call_site_(FlightRecord::call_site) {}

void Operation::add_request(Direction direction, int peer, const Descriptor& descriptor,
                            std::byte* data) {
  std::lock_guard lock(mutex_);
  requests_.push_back(make_request(direction, peer, descriptor, data));
}

void Operation::add_requests(RequestList requests) {
  std::lock_guard lock(mutex_);
  if (requests_.empty())
    requests_ = std::move(requests);
  else
    requests_.append(requests.begin(), requests.end());
}

RequestList Operation::seal() {
  std::unique_lock lock(mutex_);
  num_pending_ = static_cast<int>(requests_.size());
  RequestList to_post = requests_;
  if (num_pending_ == 0) finish(lock);
  return to_post;
}

void Operation::hold() {
  std::lock_guard lock(mutex_);
  is_held_ = true;
  num_pending_ = 1;
}

void Operation::add(RequestPtr request) {
  std::lock_guard lock(mutex_);
  if (done_) return;  // the operation has failed; its messages are sent all the same
  ++num_pending_;
  requests_.push_back(std::move(request));
}

void Operation::note_posted() {
  std::lock_guard lock(mutex_);
  num_posted_ = requests_.size();
  if (!is_held_) return;
  has_new_requests_ = true;
  settled_.notify_all();
}

void Operation::settle(Request& request, FailurePtr failure) {
  if (request.settled.exchange(true)) return;
  if (request.on_settled) failure = request.on_settled(std::move(failure));
  if (request.operation) request.operation->settle_one(std::move(failure));
}

void Operation::settle_one(FailurePtr failure) {
  std::unique_lock lock(mutex_);
  if (done_) return;  // the operation has failed earlier
  if (failure && !failure_) {
    failure_ = std::move(failure);
    failed_at_ = Clock::now();
  }
  if (--num_pending_ == 0) finish(lock);
}

// Runs the epilogue without the lock, then publishes the end. Resources are released last, when
// waiters can run, and always without the lock: freeing a tensor may have to wait for Python.
void Operation::finish(std::unique_lock<std::mutex>& lock) {
  const auto epilogue = std::move(epilogue_);
  if (epilogue && !failure_) {
    is_finishing_ = true;
    lock.unlock();
    FailurePtr failure;
    try {
      epilogue();
    } catch (const std::exception& error) {
      failure = std::make_shared<Failure>(
          Failure{.message = std::string("unpack failed: ") + error.what(), .op = op_name(op_)});
    }
    lock.lock();
    if (failure) failure_ = std::move(failure);
  }
  write_down();
  const auto kept = std::move(kept_);
  const auto requests = std::move(requests_);
  done_.store(true, std::memory_order_release);
  settled_.notify_all();
  lock.unlock();
}

void Operation::fail(FailurePtr failure) {
  std::unique_lock lock(mutex_);
  settled_.wait(lock, [this] { return done_ || !is_finishing_; });
  if (done_) return;
  if (!failure_) failure_ = std::move(failure);
  write_down();
  // `kept_` stays: the transport may still hold the requests, which own this operation and so the
  // memory in use.
  const auto requests = std::move(requests_);
  const auto epilogue = std::move(epilogue_);
  done_.store(true, std::memory_order_release);
  settled_.notify_all();
  lock.unlock();
}

void Operation::let_go() {
  InlineVector<std::shared_ptr<void>, 4> kept;
  std::lock_guard lock(mutex_);
  kept = std::move(kept_);
}

FailurePtr Operation::failure() const {
  std::lock_guard lock(mutex_);
  return failure_;
}

bool Operation::failed_before(Clock::time_point time) const {
  std::lock_guard lock(mutex_);
  return failure_ && failed_at_ < time;
}

bool Operation::wait_until(Deadline until) {
  if (done()) return true;
  std::unique_lock lock(mutex_);
  settled_.wait_until(lock, until, [this] { return done_ || has_new_requests_; });
  has_new_requests_ = false;
  return done_;
}

RequestList Operation::requests() const {
  std::lock_guard lock(mutex_);
  RequestList posted;
  if (!done_) posted.assign(requests_.begin(), requests_.begin() + num_posted_);
  return posted;
}

FlightOperation Operation::flight_operation() const {
  FlightOperation flight;
  flight.number = number_;
  flight.op = op_;
  flight.call_site = call_site_;
  flight.posted_at = posted_at_;
  flight.num_messages = requests_.size();
  Clock::rep started_at = 0;
  for (const RequestPtr& request : requests_) {
    const Clock::rep at = request->started_at.load(std::memory_order_relaxed);
    if (at != 0 && (started_at == 0 || at < started_at)) started_at = at;
  }
  flight.started_at = Clock::time_point(Clock::duration(started_at));
  return flight;
}

FlightMessage Operation::flight_message(size_t idx) const {
  const Request& request = *requests_[idx];
  const auto state = request.settled ? MessageState::done
                     : request.started_at.load(std::memory_order_relaxed) != 0
                         ? MessageState::started
                         : MessageState::posted;
  return {request.direction, state, request.refuses, request.peer, request.descriptor};
}

// Unsettled messages come first, since they explain a hang.
std::vector<FlightMessage> Operation::pending_messages() const {
  std::vector<FlightMessage> messages;
  for (const bool settled : {false, true})
    for (size_t idx = 0; idx < requests_.size(); ++idx)
      if (requests_[idx]->settled == settled &&
          messages.size() < FlightRecord::kMaxMessagesPerOperation)
        messages.push_back(flight_message(idx));
  return messages;
}

// Called before waiters are woken, so that a record that they read includes the operation.
void Operation::write_down() const {
  if (!record_) return;
  FlightOperation flight = flight_operation();
  flight.ended = true;
  flight.ended_at = Clock::now();
  flight.failure = failure_;
  record_->add(flight, [this](size_t idx) { return flight_message(idx); });
}

std::optional<Flight> Operation::pending_flight() const {
  std::lock_guard lock(mutex_);
  if (done_) return std::nullopt;
  Flight flight{flight_operation(), pending_messages()};
  flight.operation.failure = failure_;
  return flight;
}

bool Operation::waits_to_start() const {
  std::lock_guard lock(mutex_);
  return !done_ && requests_.empty();
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
