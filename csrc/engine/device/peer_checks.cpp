#include "engine/device/peer_checks.h"

#include "transport/group_tree.h"

namespace pipecomm {
namespace {

constexpr auto kClaimPoll = std::chrono::milliseconds(10);
constexpr size_t kMaxReasonBytes = 4096;

}  // namespace

Failure closed_failure(const Dispatch& dispatch, OpCode op, int peer) {
  return {.kind = FailureKind::peer_lost,
          .message = std::string(op_name(op)) + ": rank " + std::to_string(peer) +
                     " has closed its communicator",
          .op = op_name(op),
          .rank = dispatch.rank(),
          .peer = peer,
          .origin_rank = peer};
}

void fail_late(Dispatch& dispatch, OpCode op, Clock::time_point begin, Deadline deadline,
               const std::string& what, std::optional<int> peer) {
  Failure failure = dispatch.own_failure(
      FailureKind::timeout,
      std::string(op_name(op)) + " timed out after " + seconds_text(Clock::now() - begin) +
          " (limit " + seconds_text(deadline - begin) + "), " + what +
          (peer ? "; rank " + std::to_string(*peer) + " " + dispatch.describe_peer(*peer) : "") +
          "; check that the other ranks make their communicators and call the matching operation, "
          "or increase timeout=",
      op_name(op));
  failure.peer = peer.value_or(failure.peer);
  dispatch.fail(std::move(failure));
  throw_failure(dispatch);
}

// Inside a capture no call waits for other ranks, so its messages must be known: all of them, before
// anything is noted of the first.
void PeerChecks::post(std::span<const PointToPoint> batch, DeviceOperation& operation,
                      const Interrupted& interrupted) {
  const bool is_awaited = check_ == Check::full && !operation.is_async;
  const auto descriptor_of = [](const PointToPoint& op) {
    return describe(OpCode::p2p, op.channel, op.tensor, op.signature, op.tensor.num_bytes());
  };
  for (const PointToPoint& op : batch) {
    if (!operation.is_captured()) break;
    if (op.peer == rank() || messages_.is_known(op.peer, op.direction, descriptor_of(op))) continue;
    throw std::invalid_argument(
        "first " + std::string(op.direction == Direction::send ? "send to" : "recv from") +
        " rank " + std::to_string(op.peer) + " of " + descriptor_of(op).text() +
        " inside a CUDA graph capture, where the two ranks cannot compare it; run the batch once "
        "before capturing, or use check=\"off\"");
  }
  MessageCheck::Posted posted;
  for (const PointToPoint& op : batch) {
    if (op.peer == rank()) continue;
    const Descriptor descriptor = descriptor_of(op);
    if (operation.is_captured())
      messages_.capture(op.peer, op.direction, descriptor, posted);
    else
      messages_.post(op.peer, op.direction, descriptor, is_awaited, posted);
    number(operation, op.direction, op.peer, descriptor);
  }
  if (operation.is_captured()) has_captured_ = true;
  announce(OpCode::p2p, posted);
  if (is_awaited && !operation.is_captured())
    await_claims(OpCode::p2p, posted.announcements, operation.deadline(), interrupted);
}

void PeerChecks::post(const CollectiveCall& call, bool is_captured, const CallOptions& options) {
  const MessageCheck::Collective collective = compared(call);
  if (is_captured) {
    if (!messages_.is_known(collective))
      throw std::invalid_argument(std::string("first ") + op_name(call.op) +
                                  " with these arguments inside a CUDA graph capture, where the "
                                  "ranks cannot compare them; run it once before capturing");
    has_captured_ = true;
    return announce(call.op, messages_.capture(collective));
  }
  // Asynchronous calls on several channels may come in any order, as messages do.
  const bool is_awaited =
      check_ == Check::full && (!options.is_async || call.scope.channel == kCollectiveChannel);
  const MessageCheck::Posted posted = messages_.post(collective, is_awaited);
  announce(call.op, posted);
  if (is_awaited)
    await_claims(call.op, posted.announcements, dispatch_.deadline_from_now(), options.interrupted);
}

MessageCheck::Collective PeerChecks::compared(const CollectiveCall& call) const {
  const std::vector<int>& members = call.scope.members;
  std::vector<int> peers = call.compared_peers;
  if (members.empty()) {
    std::ranges::copy(tree_neighbours(rank(), size()), std::back_inserter(peers));
  } else {
    const auto place = std::ranges::find(members, rank()) - members.begin();
    for (const int member : tree_neighbours(int(place), int(members.size())))
      peers.push_back(members[size_t(member)]);
  }
  return {call.scope.channel, dispatch_.peers_in(call.scope), std::move(peers), call.messages_with};
}

void PeerChecks::announce(OpCode op, const MessageCheck::Posted& posted,
                          const std::string& refusal) {
  const auto reason = std::as_bytes(std::span(refusal));
  for (const auto& [peer, direction, descriptor] : posted.announcements)
    send(dispatch_, peer,
         {.kind = ControlMessage::Kind::claim,
          .direction = direction,
          .descriptor = descriptor,
          .payload = {reason.begin(), reason.end()}});
  if (!posted.mismatch) return;
  fail_mismatch(op, *posted.mismatch);
  throw_failure(dispatch_);
}

// Waits until the other ends have announced their messages and agree. If that fails, the call has
// numbered its messages but enqueues nothing, so all ranks fail.
void PeerChecks::await_claims(OpCode op, std::span<const MessageCheck::Announcement> announced,
                              Deadline deadline, const Interrupted& interrupted) {
  const Clock::time_point begin = Clock::now();
  while (const auto peer = messages_.missing(announced, Clock::now() + kClaimPoll)) {
    if (dispatch_.failure()) throw_failure(dispatch_);
    if (dispatch_.transport().has_closed(*peer) ||
        (counts_.has_limit(*peer) && messages_.missing(announced, Clock::now()) == peer)) {
      dispatch_.fail(closed_failure(dispatch_, op, *peer));
    } else if (Clock::now() >= deadline) {
      fail_late(dispatch_, op, begin, deadline,
                "rank " + std::to_string(*peer) + " has not announced its part", *peer);
    } else if (interrupted) {
      try {
        interrupted();
      } catch (...) {
        dispatch_.abort(std::string(op_name(op)) +
                        " was interrupted while it waited for other ranks");
        throw;
      }
    }
  }
}

// Numbers a message in the order of its (peer, direction, channel), as the host transports do.
void PeerChecks::number(DeviceOperation& operation, Direction direction, int peer,
                        Descriptor descriptor) {
  descriptor.seq = counts_.next(peer, direction, descriptor.channel);
  operation.add_message(direction, peer, descriptor);
}

void PeerChecks::post_barrier() {
  const Descriptor empty = describe(OpCode::barrier, kCollectiveChannel, {}, 0, 0);
  const CollectiveCall call{OpCode::barrier, {}, {}, {}, same_messages(empty)};
  announce(OpCode::barrier, messages_.post(compared(call), false));
}

void PeerChecks::refuse(OpCode op, const std::string& reason, const Scope& scope) {
  const Descriptor empty = describe(op, scope.channel, {}, 0, 0);
  const auto posted =
      messages_.post(compared({op, scope, {}, {}, same_messages(empty)}), false, true);
  announce(op, posted, reason.empty() ? "no reason was given" : reason.substr(0, kMaxReasonBytes));
  if (!posted.is_compared) dispatch_.fail(refused_failure(op, rank(), reason));
}

bool PeerChecks::receive(int peer, const ControlMessage& message) {
  const Direction direction = message.direction;
  if (message.kind == ControlMessage::Kind::closing) {
    counts_.limit(peer, opposite(direction), message.channel, message.number);
    return true;
  }
  if (message.kind != ControlMessage::Kind::claim) return false;
  const auto* const refusal = reinterpret_cast<const char*>(message.payload.data());
  if (const auto mismatch =
          messages_.receive(peer, direction, message.descriptor, {refusal, message.payload.size()}))
    fail_mismatch(message.descriptor.op, *mismatch);
  return true;
}

// Throws for a message that a closed peer will not match. Captured messages are not counted the
// same on both ends, see send_closing().
void PeerChecks::require_open(OpCode op, Direction direction, int peer, int channel) const {
  if (!has_captured_ && counts_.has_ended(peer, direction, channel))
    throw PipeCommException(closed_failure(dispatch_, op, peer));
}

void PeerChecks::fail_mismatch(OpCode op, const MessageCheck::Mismatch& mismatch) {
  if (!mismatch.refusal.empty())
    return dispatch_.fail(refused_failure(op, mismatch.peer, mismatch.refusal));
  const bool sends = mismatch.direction == Direction::send;
  Failure failure{.kind = FailureKind::mismatch, .rank = rank()};
  name_message(failure, mismatch.peer, mismatch.ours);
  failure.origin_rank = sends ? mismatch.peer : rank();
  failure.message =
      disagreement_text(mismatch.direction, mismatch.peer, mismatch.ours, mismatch.theirs) +
      (mismatch.is_under_way
           ? "; the transfer was under way, so what was received is not to be trusted"
           : "; nothing was transferred between the two; make the two calls agree");
  failure.ours = description_of(mismatch.ours);
  failure.theirs = description_of(mismatch.theirs);
  dispatch_.fail(std::move(failure));
}

Failure PeerChecks::refused_failure(OpCode op, int by, const std::string& reason) const {
  const std::string name = op_name(op);
  Failure failure =
      dispatch_.own_failure(FailureKind::mismatch,
                            name + " was refused by rank " + std::to_string(by) + ": " + reason +
                                "; other ranks had already started it, which cannot be undone",
                            name);
  failure.origin_rank = by;
  return failure;
}

// NCCL cannot take back a message, so one without another end fails the communicator.
void PeerChecks::fail_unmatched() {
  const auto unmatched = has_captured_ ? std::nullopt : counts_.unmatched();
  if (!unmatched) return;
  Descriptor descriptor;
  descriptor.channel = static_cast<uint8_t>(unmatched->channel);
  descriptor.seq = unmatched->seq;
  Failure failure{.kind = FailureKind::peer_lost, .rank = rank(), .origin_rank = unmatched->peer};
  name_message(failure, unmatched->peer, descriptor);
  failure.message = (descriptor.channel == kCollectiveChannel
                         ? "a collective with rank " + std::to_string(unmatched->peer)
                         : message_text(unmatched->direction, unmatched->peer, descriptor)) +
                    " has no other end: rank " + std::to_string(unmatched->peer) +
                    " has closed its communicator";
  dispatch_.fail(std::move(failure));
}

// Sends the message counts to peers: to all of a small group, and to those of a large one that this
// rank has had messages with. Replays of a graph are not counted, so a rank that has captured a
// message sends nothing.
void PeerChecks::send_closing() {
  if (has_captured_ || dispatch_.failure()) return;
  const bool are_many = dispatch_.are_many(size_t(size()));
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank() || (are_many && !counts_.has_any(peer))) continue;
    for (int idx = 0; idx <= dispatch_.options().num_channels; ++idx) {
      const int channel = idx == dispatch_.options().num_channels ? kCollectiveChannel : idx;
      for (const Direction direction : {Direction::send, Direction::recv}) {
        send(dispatch_, peer,
             {.kind = ControlMessage::Kind::closing,
              .channel = channel,
              .direction = direction,
              .number = counts_.count(peer, direction, channel)});
      }
    }
  }
}

}  // namespace pipecomm
