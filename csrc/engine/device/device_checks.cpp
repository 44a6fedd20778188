// What a DeviceExecution compares with other ranks, or refuses, before it enqueues anything.
#include <algorithm>

#include "engine/device/device_execution.h"

namespace pipecomm {
namespace {

// Of each collective, so many agreements are awaited: a mistake is refused before anything moves.
// Later ones, of lengths that vary from step to step, are compared behind the transfer, since a wait
// would hold up the host until the slowest one is there.
constexpr int kNumAwaited = 8;
// Distinct collectives of many members that are remembered; then all forget all of them.
constexpr size_t kMaxCompared = 4096;

}  // namespace

void DeviceExecution::throw_failure() const { throw PipeCommException(communicator_.failure()); }

// The capture that the call is part of, or 0. The streams of `lanes` will be made to wait for the
// caller's: one that takes part in a capture cannot wait for anything outside of it, and to try
// breaks the capture.
uint64_t DeviceExecution::check_captures(OpCode op, std::span<const LaneKey> lanes) const {
  const uint64_t capture = runtime_->capture_of(runtime_->current_stream());
  if (capture == kBrokenCapture)
    throw std::invalid_argument(
        std::string(op_name(op)) +
        " inside a CUDA graph capture that an earlier error has broken; end "
        "it, and capture again");
  if (capture != 0 && !options_.capture_problem.empty())
    throw std::invalid_argument(std::string(op_name(op)) +
                                " inside a CUDA graph capture: " + options_.capture_problem);
  for (const LaneKey& key : lanes) {
    const StreamHandle stream = links_->stream_of(key);
    const uint64_t other = stream ? runtime_->capture_of(stream) : 0;
    if (other == 0 || other == capture) continue;
    const bool is_collective = key.channel == kCollectiveChannel;
    const std::string order = is_collective ? "the collectives take"
                                            : "channel " + std::to_string(key.channel) + " takes";
    throw std::invalid_argument(
        std::string(op_name(op)) + " beside a CUDA graph capture, which " + order +
        " part in until it ends; call it inside of the capture or after its end" +
        (is_collective ? "" : ", or use another channel"));
  }
  return capture;
}

// Claims what is new, or refuses it inside a capture.
void DeviceExecution::check_messages(std::span<const PointToPoint> batch,
                                     DeviceOperation& operation) {
  for (const PointToPoint& op : batch) {
    if (op.peer == rank()) continue;
    Descriptor descriptor =
        describe(OpCode::p2p, op.channel, op.tensor, op.signature, op.tensor.num_bytes());
    if (operation.is_captured()) {
      if (!check_.is_known(op.peer, op.direction, descriptor))
        throw std::invalid_argument(
            "first " + std::string(op.direction == Direction::send ? "send to" : "recv from") +
            " rank " + std::to_string(op.peer) + " of " + descriptor.text() +
            " inside a CUDA graph capture, where the two ranks cannot compare it; run the batch "
            "once before capturing, or use check=\"off\"");
      note_captured(op.peer, op.direction, descriptor);
      note_message(operation, op.direction, op.peer, descriptor);
      continue;
    }
    const MessageCheck::Posted posted = check_.posted(op.peer, op.direction, descriptor);
    note_message(operation, op.direction, op.peer, descriptor);
    if (posted.claim) communicator_.claim(op.peer, op.direction, descriptor);
    if (posted.mismatch) {
      fail_mismatch(*posted.mismatch);
      throw_failure();
    }
  }
}

// Host traffic that does not wait, and that no stream takes part in: harmless in a capture.
void DeviceExecution::note_captured(int peer, Direction direction, const Descriptor& descriptor) {
  if (const auto news = check_.captured(peer, direction, descriptor))
    communicator_.claim(peer, direction, *news);
}

// Numbers a message in the order of its (peer, direction, channel), like the host transports do.
void DeviceExecution::note_message(DeviceOperation& operation, Direction direction, int peer,
                                   Descriptor descriptor) {
  descriptor.seq = counts_.next(peer, direction, descriptor.channel);
  operation.add_message(direction, peer, descriptor);
}

// What a capture can take part in is known: nobody waits for other ranks while it lasts.
void DeviceExecution::check_captured(OpCode op, std::span<const PeerMessages> pairs, bool is_new) {
  if (is_new)
    throw std::invalid_argument(std::string("first ") + op_name(op) +
                                " with these arguments inside a CUDA graph capture, where the "
                                "ranks cannot compare them; run it once before capturing");
  for (const PeerMessages& pair : pairs) {
    note_captured(pair.peer, Direction::send, pair.send);
    note_captured(pair.peer, Direction::recv, pair.recv);
  }
}

// Compares a collective before its messages travel. Pairs of ranks for which it is new do so, and
// since both ends of a pair know what was new to them, no other rank has to take part.
void DeviceExecution::agree(const Compared& compared, std::span<const PeerMessages> pairs,
                            const Interrupted& interrupted) {
  const auto& [op, scope, common, messages_with, data_peers, claimed_peers] = compared;
  std::vector<PeerMessages> fresh;
  for (const PeerMessages& pair : pairs)
    if (!is_known(pair)) fresh.push_back(pair);
  if (runtime_->is_capturing(runtime_->current_stream()))
    return check_captured(op, pairs, !fresh.empty());
  const bool is_full = options_.check == Check::full;
  const bool is_collective = scope.channel == kCollectiveChannel;
  if (is_collective && !is_full)
    // A peer to which those are known that are new here does not come to compare them: a claim tells
    // it of the mismatch.
    for (const PeerMessages& pair : pairs)
      claim(pair, std::ranges::binary_search(fresh, pair.peer, {}, &PeerMessages::peer));
  if (fresh.empty() && !is_full) return;

  // On a channel of the user nobody waits for an agreement, or reads its notes.
  const auto agreement = std::make_shared<Agreement>(
      rank(), size(), is_full ? pairs : std::span(fresh), fresh, is_collective);
  const OperationPtr operation = communicator_.make_operation(op);
  operation->keep(agreement);
  communicator_.post_collective(
      {operation, scope.members, common, false,
       [agreement](std::span<const int> /*peers*/) { return agreement->requests(); }},
      scope.channel);
  if (is_collective && !fresh.empty() && num_agreed_[op] < kNumAwaited) {
    await_agreement(op, *operation, agreement, fresh.size() == pairs.size(), interrupted);
    ++num_agreed_[op];
  } else {
    compare_behind(operation);
  }
  learn(fresh);
}

// Of many members all compare a collective, or none does. The first times that they make it they do,
// which all count alike; what is new to a pair of them later is claimed. Members that do not agree
// send each other what they believe of every pair, as few members do at once.
void DeviceExecution::agree_along_tree(const Compared& compared, const Interrupted& interrupted) {
  const auto& [op, scope, common, messages_with, data_peers, claimed_peers] = compared;
  const std::vector<PeerMessages> pairs = messages_with(claimed_peers);
  auto& num_compared = num_compared_[scope.members];
  if (num_compared.size() == kMaxCompared) num_compared.clear();
  const auto found = num_compared.find(common.digest());
  const int num_times = found == num_compared.end() ? 0 : found->second;
  const bool is_captured = runtime_->is_capturing(runtime_->current_stream());
  if (is_captured)
    check_captured(op, pairs, num_times == 0 || !std::ranges::all_of(pairs, [&](const auto& pair) {
                                return is_known(pair);
                              }));
  const bool is_full = options_.check == Check::full;
  const bool is_compared = is_full || num_times < kNumAwaited;
  if (!is_captured && !is_full)
    for (const PeerMessages& pair : pairs) claim(pair, is_compared);
  if (!is_compared) return;

  const OperationPtr operation = communicator_.make_operation(op);
  Collective collective{operation, scope.members, common};
  Statement statement;
  for (const PeerMessages& pair : pairs) {
    if (pair.sends()) statement.add(rank(), Direction::send, pair.peer, pair.send);
    if (pair.receives()) statement.add(rank(), Direction::recv, pair.peer, pair.recv);
  }
  collective.balance = statement.balance;
  const auto agreement = std::make_shared<std::shared_ptr<const Agreement>>();
  collective.messages_with = [rank = rank(), size = size(), messages_with, operation,
                              agreement](std::span<const int> peers) {
    const std::vector<PeerMessages> all = messages_with(peers);
    const auto direct = std::make_shared<Agreement>(rank, size, all, all, true);
    operation->keep(direct);
    *agreement = direct;
    return direct->requests();
  };
  communicator_.post_collective(std::move(collective), scope.channel);
  if (!is_captured && num_agreed_[op] < kNumAwaited) {
    try {
      await_agreement(op, *operation, *agreement, true, interrupted);
    } catch (...) {
      check_.stop_numbers(scope.channel);  // each has numbered what it believed to be in it
      throw;
    }
    ++num_agreed_[op];
  } else {
    compare_behind(operation);
  }
  ++num_compared[common.digest()];
  learn(pairs);
}

bool DeviceExecution::is_known(const PeerMessages& pair) const {
  return check_.is_known(pair.peer, Direction::send, pair.send) &&
         check_.is_known(pair.peer, Direction::recv, pair.recv);
}

// Numbers the messages with a peer, and tells it of those that are new here.
void DeviceExecution::claim(const PeerMessages& pair, bool is_compared) {
  for (const Direction direction : {Direction::send, Direction::recv}) {
    Descriptor descriptor = direction == Direction::send ? pair.send : pair.recv;
    MessageCheck::Posted posted{.claim = true, .mismatch = {}};
    if (is_compared)
      check_.skip(pair.peer, direction, descriptor);
    else
      posted = check_.posted(pair.peer, direction, descriptor);
    if (posted.claim) communicator_.claim(pair.peer, direction, descriptor);
    if (!posted.mismatch) continue;
    fail_mismatch(*posted.mismatch);
    throw_failure();
  }
}

void DeviceExecution::learn(std::span<const PeerMessages> pairs) {
  for (const PeerMessages& pair : pairs) {
    check_.learn(pair.peer, Direction::send, pair.send);
    check_.learn(pair.peer, Direction::recv, pair.recv);
  }
}

void DeviceExecution::compare_behind(const OperationPtr& operation) {
  std::lock_guard lock(mutex_);
  pending_.push_back({operation, std::nullopt, Clock::now()});
}

// `agreement` may be set while the operation runs.
void DeviceExecution::await_agreement(OpCode op, Operation& operation,
                                      const std::shared_ptr<const Agreement>& agreement,
                                      bool is_new_to_all, const Interrupted& interrupted) {
  try {
    communicator_.wait(operation, Deadline::max(), interrupted);
  } catch (const PipeCommException& error) {
    // Peers that have run it with this rank before do not wait, and cannot take it back.
    if (!is_new_to_all && error.failure()->kind == FailureKind::mismatch) {
      communicator_.fail(*error.failure());
      throw_failure();
    }
    throw;
  }
  const auto disagreement = agreement ? agreement->disagreement() : std::nullopt;
  if (!disagreement) return;
  const std::string name = op_name(op);
  Failure refused =
      communicator_.own_failure(FailureKind::mismatch,
                                name + " was refused: " + disagreement->text +
                                    "; nothing was transferred; make the two calls agree",
                                name);
  refused.origin_rank = disagreement->receiver;
  throw PipeCommException(std::move(refused));
}

OperationPtr DeviceExecution::refuse(OpCode op, const std::string& reason, const Scope& scope) {
  const std::string name = op_name(op);
  Failure failure = communicator_.own_failure(
      FailureKind::mismatch,
      name + " was refused by rank " + std::to_string(rank()) + ": " + reason +
          "; the other ranks had already started it, which cannot be undone",
      name);
  if (size() == 1 || options_.check == Check::off) {
    if (size() > 1) communicator_.fail(std::move(failure));
    const OperationPtr nobody_is_told = communicator_.make_operation(op);
    nobody_is_told->seal();
    return nobody_is_told;
  }
  std::lock_guard collective_lock(collective_mutex_);
  const std::vector<int> peers = communicator_.peers_in(scope);
  if (scope.channel == kCollectiveChannel && communicator_.are_many(peers.size() + 1)) {
    check_.stop_numbers(scope.channel);
  } else if (scope.channel == kCollectiveChannel) {
    Descriptor refused = describe(op, scope.channel, {}, 0, 0);
    for (const int peer : peers)
      for (const Direction direction : {Direction::send, Direction::recv})
        check_.skip(peer, direction, refused);
  }
  const OperationPtr refusal = communicator_.post_refusal(op, reason, scope);
  std::lock_guard lock(mutex_);
  pending_.push_back({refusal, std::move(failure), Clock::now()});
  return refusal;
}

}  // namespace pipecomm
