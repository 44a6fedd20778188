// What a DeviceExecution compares with other ranks, or refuses, before it enqueues anything.
#include <algorithm>

#include "engine/device/device_execution.h"

namespace pipecomm {
namespace {

// Of each collective, so many agreements are awaited: a mistake is refused before anything moves.
// Later ones, of lengths that vary from step to step, are compared behind the transfer, since a wait
// would hold up the host until the slowest one is there.
constexpr int kNumAwaited = 8;

}  // namespace

void DeviceExecution::throw_failure() const { throw PipeCommException(communicator_.failure()); }

// The capture that the call is part of, or 0. The streams of `lanes` will be made to wait for the
// caller's: one that takes part in a capture cannot wait for anything outside of it, and to try
// breaks the capture.
uint64_t DeviceExecution::check_captures(OpCode op, std::span<const int> lanes) const {
  const uint64_t capture = runtime_->capture_of(runtime_->current_stream());
  if (capture == kBrokenCapture)
    throw std::invalid_argument(
        std::string(op_name(op)) +
        " inside a CUDA graph capture that an earlier error has broken; end "
        "it, and capture again");
  for (const int lane_idx : lanes) {
    const uint64_t other = runtime_->capture_of(lanes_[size_t(lane_idx)].stream);
    if (other == 0 || other == capture) continue;
    const bool is_collective = lane_idx == collective_lane(num_channels());
    const std::string order = is_collective ? "the collectives take"
                                            : "channel " + std::to_string(lane_idx / 2) + " takes";
    throw std::invalid_argument(
        std::string(op_name(op)) + " beside a CUDA graph capture, which " + order +
        " part in until it ends; call it inside of the capture or after its end" +
        (is_collective ? "" : ", or use another channel"));
  }
  return capture;
}

// The lanes of an exchange that run on their own streams.
std::vector<int> DeviceExecution::forked_lanes(int channel, std::span<const PeerMessages> pairs,
                                               bool is_async) const {
  const int first_idx = first_lane(channel);
  std::vector<int> lanes;
  if (is_async) lanes.push_back(first_idx);
  const auto is_other = [&](Direction direction, int peer) {
    return lane_of(channel, direction, rank(), peer) != first_idx;
  };
  if (channel != kCollectiveChannel && std::ranges::any_of(pairs, [&](const PeerMessages& pair) {
        return (pair.sends() && is_other(Direction::send, pair.peer)) ||
               (pair.receives() && is_other(Direction::recv, pair.peer));
      }))
    lanes.push_back(first_idx + 1);
  return lanes;
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

// Compares a collective before its messages travel. Pairs of ranks for which it is new do so, and
// since both ends of a pair know what was new to them, no other rank has to take part.
void DeviceExecution::agree(OpCode op, std::span<const PeerMessages> pairs, const Scope& scope,
                            const Interrupted& interrupted) {
  if (pairs.empty() || options_.check == Check::off) return;
  std::vector<PeerMessages> fresh;
  for (const PeerMessages& pair : pairs)
    if (!check_.is_known(pair.peer, Direction::send, pair.send) ||
        !check_.is_known(pair.peer, Direction::recv, pair.recv))
      fresh.push_back(pair);
  if (runtime_->is_capturing(runtime_->current_stream())) {
    if (!fresh.empty())
      throw std::invalid_argument(std::string("first ") + op_name(op) +
                                  " with these arguments inside a CUDA graph capture, where the "
                                  "ranks cannot compare them; run it once before capturing");
    for (const PeerMessages& pair : pairs) {
      note_captured(pair.peer, Direction::send, pair.send);
      note_captured(pair.peer, Direction::recv, pair.recv);
    }
    return;
  }
  const bool is_full = options_.check == Check::full;
  const bool is_collective = scope.channel == kCollectiveChannel;
  if (is_collective && !is_full) claim_new(pairs, fresh);
  if (fresh.empty() && !is_full) return;

  const auto agreement =
      std::make_shared<Agreement>(rank(), size(), is_full ? pairs : std::span(fresh), fresh);
  const OperationPtr operation = communicator_.agree(op, agreement);
  if (is_collective && !fresh.empty() && num_agreed_[op] < kNumAwaited) {
    await_agreement(op, *operation, *agreement, fresh.size() == pairs.size(), interrupted);
    ++num_agreed_[op];
  } else {
    std::lock_guard lock(mutex_);
    pending_.push_back({operation, std::nullopt, Clock::now()});
  }
  for (const PeerMessages& pair : fresh) {
    check_.learn(pair.peer, Direction::send, pair.send);
    check_.learn(pair.peer, Direction::recv, pair.recv);
  }
}

// Numbers the messages of a collective. A peer to which those are known that are new here does not
// come to compare them: a claim tells it of the mismatch.
void DeviceExecution::claim_new(std::span<const PeerMessages> pairs,
                                std::span<const PeerMessages> fresh) {
  auto next_fresh = fresh.begin();
  for (const PeerMessages& pair : pairs) {
    const bool is_fresh = next_fresh != fresh.end() && next_fresh->peer == pair.peer;
    if (is_fresh) ++next_fresh;
    for (const Direction direction : {Direction::send, Direction::recv}) {
      Descriptor descriptor = direction == Direction::send ? pair.send : pair.recv;
      if (is_fresh) {
        check_.skip(pair.peer, direction, descriptor);
        communicator_.claim(pair.peer, direction, descriptor);
      } else if (const auto posted = check_.posted(pair.peer, direction, descriptor);
                 posted.mismatch) {
        fail_mismatch(*posted.mismatch);
        throw_failure();
      }
    }
  }
}

void DeviceExecution::await_agreement(OpCode op, Operation& operation, const Agreement& agreement,
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
  const auto disagreement = agreement.disagreement();
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
  if (scope.channel == kCollectiveChannel) {
    Descriptor refused = describe(op, scope.channel, {}, 0, 0);
    for (const int peer : communicator_.peers_in(scope))
      for (const Direction direction : {Direction::send, Direction::recv})
        check_.skip(peer, direction, refused);
  }
  const OperationPtr refusal = communicator_.post_refusal(op, reason, scope);
  std::lock_guard lock(mutex_);
  pending_.push_back({refusal, std::move(failure), Clock::now()});
  return refusal;
}

}  // namespace pipecomm
