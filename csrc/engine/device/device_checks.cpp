// What a DeviceExecution compares with other ranks, or refuses, before it enqueues anything.
#include "engine/device/device_execution.h"
#include "transport/group_tree.h"

namespace pipecomm {
namespace {

constexpr auto kClaimPoll = std::chrono::milliseconds(10);
constexpr size_t kMaxReasonBytes = 4096;

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

// ------------------------------------------------------------------------------------------------
// what ranks announce

// Inside a capture no call waits for other ranks, so what it takes part in must be known.
void DeviceExecution::check_messages(std::span<const PointToPoint> batch,
                                     DeviceOperation& operation, const Interrupted& interrupted) {
  const bool is_awaited = options_.check == Check::full && !operation.is_async;
  MessageCheck::Posted posted;
  for (const PointToPoint& op : batch) {
    if (op.peer == rank()) continue;
    const Descriptor descriptor =
        describe(OpCode::p2p, op.channel, op.tensor, op.signature, op.tensor.num_bytes());
    if (!operation.is_captured()) {
      check_.post(op.peer, op.direction, descriptor, is_awaited, posted);
    } else if (check_.is_known(op.peer, op.direction, descriptor)) {
      check_.capture(op.peer, op.direction, descriptor, posted);
    } else {
      throw std::invalid_argument(
          "first " + std::string(op.direction == Direction::send ? "send to" : "recv from") +
          " rank " + std::to_string(op.peer) + " of " + descriptor.text() +
          " inside a CUDA graph capture, where the two ranks cannot compare it; run the batch "
          "once before capturing, or use check=\"off\"");
    }
    note_message(operation, op.direction, op.peer, descriptor);
  }
  announce(OpCode::p2p, posted);
  if (is_awaited && !operation.is_captured())
    await_claims(OpCode::p2p, posted.announcements, operation.deadline(), interrupted);
}

void DeviceExecution::check_collective(const CollectiveCall& call, bool is_captured,
                                       const CallOptions& options) {
  const MessageCheck::Collective collective = compared(call);
  if (is_captured) {
    if (!check_.is_known(collective))
      throw std::invalid_argument(std::string("first ") + op_name(call.op) +
                                  " with these arguments inside a CUDA graph capture, where the "
                                  "ranks cannot compare them; run it once before capturing");
    return announce(call.op, check_.capture(collective));
  }
  // Asynchronous calls on several channels may come in any order, as messages do.
  const bool is_awaited = options_.check == Check::full &&
                          (!options.is_async || call.scope.channel == kCollectiveChannel);
  const MessageCheck::Posted posted = check_.post(collective, is_awaited);
  announce(call.op, posted);
  if (is_awaited)
    await_claims(call.op, posted.announcements, communicator_.deadline_from_now(),
                 options.interrupted);
}

MessageCheck::Collective DeviceExecution::compared(const CollectiveCall& call) const {
  const std::vector<int>& members = call.scope.members;
  std::vector<int> peers = call.compared_peers;
  if (members.empty()) {
    std::ranges::copy(tree_neighbours(rank(), size()), std::back_inserter(peers));
  } else {
    const auto place = std::ranges::find(members, rank()) - members.begin();
    for (const int member : tree_neighbours(int(place), int(members.size())))
      peers.push_back(members[size_t(member)]);
  }
  return {call.scope.channel, communicator_.peers_in(call.scope), std::move(peers),
          call.messages_with};
}

void DeviceExecution::announce(OpCode op, const MessageCheck::Posted& posted,
                               const std::string& refusal) {
  const auto reason = std::as_bytes(std::span(refusal));
  for (const auto& [peer, direction, descriptor] : posted.announcements)
    send({.kind = ControlMessage::Kind::claim,
          .direction = direction,
          .descriptor = descriptor,
          .payload = {reason.begin(), reason.end()}},
         peer);
  if (!posted.mismatch) return;
  fail_mismatch(op, *posted.mismatch);
  throw_failure();
}

// The other ends have announced their messages too, and agree. A call that does not get that far has
// taken its place among the messages and enqueues nothing, so all ranks fail.
void DeviceExecution::await_claims(OpCode op, std::span<const MessageCheck::Announcement> announced,
                                   Deadline deadline, const Interrupted& interrupted) {
  const Clock::time_point begin = Clock::now();
  while (const auto peer = check_.missing(announced, Clock::now() + kClaimPoll)) {
    if (communicator_.failure()) throw_failure();
    if (communicator_.transport().has_closed(*peer) ||
        (counts_.has_limit(*peer) && check_.missing(announced, Clock::now()) == peer)) {
      communicator_.fail(closed_failure(op, *peer));
    } else if (Clock::now() >= deadline) {
      fail_late(op, begin, deadline,
                "rank " + std::to_string(*peer) + " has not announced its part", *peer);
    } else if (interrupted) {
      try {
        interrupted();
      } catch (...) {
        communicator_.abort(std::string(op_name(op)) +
                            " was interrupted while it waited for other ranks");
        throw;
      }
    }
  }
}

// Numbers a message in the order of its (peer, direction, channel), like the host transports do.
void DeviceExecution::note_message(DeviceOperation& operation, Direction direction, int peer,
                                   Descriptor descriptor) {
  descriptor.seq = counts_.next(peer, direction, descriptor.channel);
  operation.add_message(direction, peer, descriptor);
}

// The others hear of it in the place of their collective, whether they have begun it or not.
OperationPtr DeviceExecution::refuse(OpCode op, const std::string& reason, const Scope& scope) {
  const OperationPtr nobody_waits = communicator_.make_operation(op);
  nobody_waits->seal();
  if (size() == 1) return nobody_waits;
  const auto lock = communicator_.lock_posts(op);
  const Descriptor empty = describe(op, scope.channel, {}, 0, 0);
  const auto posted = check_.refuse(compared({op, scope, {}, {}, empty_messages(empty)}));
  announce(op, posted, reason.empty() ? "no reason was given" : reason.substr(0, kMaxReasonBytes));
  if (!posted.is_compared) communicator_.fail(refused_failure(op, rank(), reason));
  return nobody_waits;
}

OperationPtr DeviceExecution::barrier(bool is_async) {
  const Descriptor empty = describe(OpCode::barrier, kCollectiveChannel, {}, 0, 0);
  announce(OpCode::barrier,
           check_.post(compared({OpCode::barrier, {}, {}, {}, empty_messages(empty)}), false));
  return communicator_.post_barrier(is_async);
}

}  // namespace pipecomm
