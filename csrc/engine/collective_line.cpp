#include "engine/collective_line.h"

#include <algorithm>
#include <numeric>

namespace pipecomm {

// ------------------------------------------------------------------------------------------------
// one after the other

void CollectiveLine::submit(Collective collective, bool is_async) {
  collective.operation->hold();
  std::unique_lock lock(mutex_);
  if (is_stopped_) return;
  waiting_.push_back(std::move(collective));
  run(lock, is_async);
}

// Runs until nothing is left to do now. Operations whose messages are all posted are released last:
// the epilogue of one may be slow, and must not delay the start of the next one.
void CollectiveLine::run(std::unique_lock<std::mutex>& lock, bool is_async) {
  if (std::exchange(is_running_, true)) return;
  while (!is_stopped_ && step(lock, is_async)) {
  }
  is_running_ = false;
  std::optional<Current> dropped_current;
  std::deque<Collective> dropped;
  std::vector<RequestPtr> dropped_sends;
  if (is_stopped_) {
    dropped_current.swap(current_);
    current_operation_ = nullptr;
    dropped.swap(waiting_);
    dropped_sends.swap(sends_);
    events_.clear();
  }
  const auto through = std::exchange(through_, {});
  changed_.notify_all();
  lock.unlock();
  for (const OperationPtr& operation : through) operation->release();
}

// Sends wait until all events have been handled, so that a verdict and the data that follow from it
// are posted in one batch.
bool CollectiveLine::step(std::unique_lock<std::mutex>& lock, bool is_async) {
  Batch batch;
  if (!events_.empty()) {
    const Event event = std::move(events_.front());
    events_.pop_front();
    if (!current_ || event.number != number_) return true;  // settled without this event
    lock.unlock();
    handle(event, batch);
  } else if (!current_ && !waiting_.empty()) {
    current_.emplace().collective = std::move(waiting_.front());
    waiting_.pop_front();
    ++number_;
    current_operation_ = current_->collective.operation;
    lock.unlock();
    start(batch);
  } else if (!sends_.empty()) {
    post(lock, std::exchange(sends_, {}), is_async);
    return true;
  } else {
    return false;
  }
  const OperationPtr operation = current_->collective.operation;
  for (const auto* requests : {&batch.recvs, &batch.sends})
    for (const RequestPtr& request : *requests) request->operation = operation;
  std::optional<Current> over;  // destroyed without the lock
  if (current_->is_over) over.swap(current_);
  lock.lock();
  sends_.insert(sends_.end(), batch.sends.begin(), batch.sends.end());
  if (over) {
    current_operation_ = nullptr;
    through_.push_back(operation);
  }
  post(lock, std::move(batch.recvs), is_async);
  if (over) {
    lock.unlock();
    over.reset();
    lock.lock();
  }
  return true;
}

void CollectiveLine::post(std::unique_lock<std::mutex>& lock, std::vector<RequestPtr> requests,
                          bool is_async) {
  if (requests.empty() || is_stopped_) return;
  lock.unlock();
  std::vector<OperationPtr> operations;  // one, or the previous and the current one
  for (const RequestPtr& request : requests) {
    request->operation->add(request);
    if (operations.empty() || operations.back() != request->operation)
      operations.push_back(request->operation);
  }
  transport_.post(requests, is_async);
  for (const OperationPtr& operation : operations) operation->note_posted();
  lock.lock();
}

std::function<FailurePtr(FailurePtr)> CollectiveLine::tell(What what, int idx) {
  return [this, number = number_, what, idx](FailurePtr failure) {
    std::unique_lock lock(mutex_);
    if (!is_stopped_) {
      events_.push_back({number, what, idx, failure});
      run(lock, true);
    }
    // A member that cannot be reached is not a failure yet: the direct exchange attributes it.
    return what == What::heard ? nullptr : failure;
  };
}

bool CollectiveLine::wait_until_idle(Deadline until) {
  const auto is_known = [](const OperationPtr& operation) {
    return operation->done() || operation->failure_seen();
  };
  std::unique_lock lock(mutex_);
  return changed_.wait_until(lock, until, [&] {
    if (is_stopped_) return true;
    return !is_running_ && (!current_operation_ || is_known(current_operation_)) &&
           std::all_of(waiting_.begin(), waiting_.end(),
                       [&](const Collective& each) { return is_known(each.operation); });
  });
}

void CollectiveLine::stop() {
  std::unique_lock lock(mutex_);
  is_stopped_ = true;
  run(lock, true);  // drops everything, unless another thread is about to
}

// ------------------------------------------------------------------------------------------------
// the members of the current collective

int CollectiveLine::num_members() const {
  const auto& members = current_->collective.members;
  return members.empty() ? size_ : static_cast<int>(members.size());
}

int CollectiveLine::rank_of(int member) const {
  const auto& members = current_->collective.members;
  return members.empty() ? member : members[member];
}

int CollectiveLine::member_of(int rank) const {
  const auto& members = current_->collective.members;
  if (members.empty()) return rank;
  return static_cast<int>(std::lower_bound(members.begin(), members.end(), rank) - members.begin());
}

std::vector<int> CollectiveLine::peers() const {
  std::vector<int> peers = current_->collective.members;
  if (peers.empty()) {
    peers.resize(size_);
    std::iota(peers.begin(), peers.end(), 0);
  }
  std::erase(peers, rank_);
  return peers;
}

// If the two ends are in different operations, the message fails, which counts as an objection.
RequestPtr CollectiveLine::control_request(Direction direction, int member, Statement* word) const {
  Descriptor descriptor = current_->collective.common;
  descriptor.channel = kControlChannel;
  descriptor.signature = 0;
  descriptor.num_bytes = sizeof(Statement);
  return make_request(direction, rank_of(member), descriptor, reinterpret_cast<std::byte*>(word));
}

// ------------------------------------------------------------------------------------------------
// its steps

void CollectiveLine::start(Batch& batch) {
  Current& current = *current_;
  const Collective& collective = current.collective;
  if (num_members() <= direct_limit_) return exchange_directly(batch);
  const TreePlace place = current.place = tree_place(member_of(rank_), num_members());
  current.tree = AgreementTree(place);
  current.words = std::make_shared<Words>();
  current.words->heard.resize(place.children.size() + 1);
  current.words->said.reserve(place.children.size() + 1);  // its elements stay where they are
  collective.operation->keep(current.words);

  Statement own{collective.common.digest(), 0, collective.refuses ? uint64_t{1} : uint64_t{0}};
  std::vector<int> data_peers = collective.data_peers;
  if (collective.source >= 0) {
    current.route = broadcast_route(place, member_of(collective.source));
    for (const int member : {current.route.whole_from, current.route.whole_to})
      if (member >= 0) data_peers.push_back(rank_of(member));
  }
  if (!collective.refuses && !data_peers.empty()) {
    for (const RequestPtr& request : collective.messages_with(data_peers)) {
      const bool is_broadcast = collective.source >= 0;
      if (!is_broadcast && request->descriptor.digest() != own.common) own.add(rank_, *request);
      if (request->descriptor.num_bytes == 0) continue;
      const bool sends = request->direction == Direction::send;
      if (is_broadcast && !sends) request->on_settled = tell(What::whole, 0);
      current.posted.emplace(request->direction, request->peer);
      (sends ? batch.sends : batch.recvs).push_back(request);
    }
  }
  // Children come first: following the first pending message from rank to rank in the flight
  // records then leads to the member that all wait for.
  std::vector<int> edges = place.children;
  if (!place.is_root()) edges.push_back(place.parent);
  for (size_t idx = 0; idx < edges.size(); ++idx) {
    batch.recvs.push_back(control_request(Direction::recv, edges[idx], &current.words->heard[idx]));
    batch.recvs.back()->on_settled = tell(What::heard, edges[idx]);
  }
  say(current.tree.start(own), batch);
}

void CollectiveLine::handle(const Event& event, Batch& batch) {
  Current& current = *current_;
  switch (event.what) {
    case What::heard: {
      const auto& children = current.place.children;
      const auto child = std::find(children.begin(), children.end(), event.idx) - children.begin();
      const bool was_decided = current.tree.verdict().has_value();
      const Statement heard = event.failure
                                  ? Statement::objection(current.collective.common.digest())
                                  : current.words->heard[child];  // the parent's is the last one
      say(current.tree.hear(event.idx, heard), batch);
      if (!was_decided && current.tree.verdict()) decide(batch);
      return;
    }
    case What::whole:
      current.is_whole_here = true;
      current.payload_failure = event.failure;
      break;
    case What::piece:
      current.has_piece[event.idx] = true;
      if (event.failure) current.payload_failure = event.failure;
      break;
  }
  if (current.tree.verdict().value_or(false)) pass_on(batch);
}

void CollectiveLine::say(const std::vector<AgreementTree::Message>& messages, Batch& batch) {
  for (const auto& [member, statement] : messages) {
    Statement& word = current_->words->said.emplace_back(statement);
    batch.sends.push_back(control_request(Direction::send, member, &word));
  }
}

void CollectiveLine::decide(Batch& batch) {
  if (!*current_->tree.verdict()) return exchange_directly(batch);
  if (current_->collective.source < 0) {
    current_->is_over = true;
    return;
  }
  receive_pieces(batch);
  pass_on(batch);
}

// Posts all messages of the direct exchange, except those that this rank has posted already.
void CollectiveLine::exchange_directly(Batch& batch) {
  for (const RequestPtr& request : current_->collective.messages_with(peers())) {
    if (current_->posted.contains({request->direction, request->peer})) continue;
    (request->direction == Direction::send ? batch.sends : batch.recvs).push_back(request);
  }
  current_->is_over = true;
}

void CollectiveLine::receive_pieces(Batch& batch) {
  Current& current = *current_;
  const int64_t num_bytes = current.collective.common.num_bytes;
  const bool has_it = current.route.pieces_from < 0 && current.route.whole_from < 0;
  current.is_whole_here |= has_it || num_bytes == 0;
  current.has_piece.assign((num_bytes + kPieceBytes - 1) / kPieceBytes, false);
  if (current.route.pieces_from < 0) return;
  for (size_t idx = 0; idx < current.has_piece.size(); ++idx) {
    batch.recvs.push_back(piece_request(Direction::recv, current.route.pieces_from, idx));
    if (!current.route.pieces_to.empty())
      batch.recvs.back()->on_settled = tell(What::piece, static_cast<int>(idx));
  }
}

// Sends the pieces in order, regardless of the order of arrival.
void CollectiveLine::pass_on(Batch& batch) {
  Current& current = *current_;
  const size_t num_pieces = current.has_piece.size();
  if (current.route.pieces_to.empty()) current.num_passed_on = num_pieces;
  for (; current.num_passed_on < num_pieces; ++current.num_passed_on) {
    if (!current.is_whole_here && !current.has_piece[current.num_passed_on]) return;
    for (const int member : current.route.pieces_to) {
      const RequestPtr request = piece_request(Direction::send, member, current.num_passed_on);
      // The members below expect the message even if this rank has no data for it.
      request->refuses = current.payload_failure != nullptr;
      if (request->refuses) request->refusal = current.payload_failure->message;
      batch.sends.push_back(request);
    }
  }
  current.is_over = true;
}

RequestPtr CollectiveLine::piece_request(Direction direction, int member, size_t idx) const {
  const Collective& collective = current_->collective;
  const int64_t begin = static_cast<int64_t>(idx) * kPieceBytes;
  Descriptor descriptor = collective.common;
  descriptor.num_bytes = std::min(kPieceBytes, descriptor.num_bytes - begin);
  return make_request(direction, rank_of(member), descriptor, collective.payload + begin);
}

}  // namespace pipecomm
