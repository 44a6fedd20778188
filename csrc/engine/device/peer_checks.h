// Announcements between a device execution and its peers: descriptions of messages, so that a
// disagreement fails the communicator, and their counts when one of them closes.
#pragma once

#include <atomic>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/device/control_message.h"
#include "engine/device/device_operation.h"
#include "engine/device/message_check.h"
#include "engine/device/message_counts.h"
#include "engine/execution.h"

namespace pipecomm {

[[noreturn]] inline void throw_failure(const Dispatch& dispatch) {
  throw PipeCommException(dispatch.failure());
}
Failure closed_failure(const Dispatch& dispatch, OpCode op, int peer);
// For a call that has waited on the host since `begin` and passed its deadline. `peer`: the rank
// that it waits for, if it is one.
[[noreturn]] void fail_late(Dispatch& dispatch, OpCode op, Clock::time_point begin,
                            Deadline deadline, const std::string& what, std::optional<int> peer);
inline void send(Dispatch& dispatch, int peer, const ControlMessage& message) {
  dispatch.transport().send_control(peer, message.encoded());
}

struct CollectiveCall {
  OpCode op;
  const Scope& scope;
  std::vector<int> data_peers;      // increasing
  std::vector<int> compared_peers;  // besides those that any collective is compared with
  std::function<std::vector<PeerMessages>(std::span<const int> peers)> messages_with;
  // Of a reduction: calls for which NCCL presumably chooses the same algorithm (it does not tell) have
  // one kind; 0: not one.
  uint64_t kind = 0;
};

class PeerChecks {
 public:
  PeerChecks(Dispatch& dispatch, Check check)
      : dispatch_(dispatch),
        check_(check),
        messages_(dispatch.size(), dispatch.options().num_channels, check) {}

  // Called before anything is enqueued, with the lock of posts. They throw if the communicator
  // fails, or std::invalid_argument for a new message inside a capture.
  void post(std::span<const PointToPoint> batch, DeviceOperation& operation,
            const Interrupted& interrupted);
  void post(const CollectiveCall& call, bool is_captured, const CallOptions& options);
  void post_barrier();
  void refuse(OpCode op, const std::string& reason, const Scope& scope);
  // Adds a message to an operation; post() of a batch calls it.
  void number(DeviceOperation& operation, Direction direction, int peer, Descriptor descriptor);

  // False if the control message does not concern messages.
  bool receive(int peer, const ControlMessage& message);
  // Throws if the peer has closed and will not match the next message.
  void require_open(OpCode op, Direction direction, int peer, int channel) const;
  // Whether the peer has announced that it posts nothing more.
  bool is_closing(int peer) const { return counts_.has_limit(peer); }

  void fail_unmatched();
  void send_closing();
  // Replays are not counted.
  bool has_captured() const { return has_captured_; }

 private:
  int rank() const { return dispatch_.rank(); }
  int size() const { return dispatch_.size(); }
  MessageCheck::Collective compared(const CollectiveCall& call) const;
  void announce(OpCode op, const MessageCheck::Posted& posted, const std::string& refusal = "");
  void await_claims(OpCode op, std::span<const MessageCheck::Announcement> announced,
                    Deadline deadline, const Interrupted& interrupted);
  void fail_mismatch(OpCode op, const MessageCheck::Mismatch& mismatch);
  Failure refused_failure(OpCode op, int by, const std::string& reason) const;

  Dispatch& dispatch_;
  const Check check_;
  MessageCheck messages_;
  MessageCounts counts_;
  std::atomic<bool> has_captured_{false};
};

}  // namespace pipecomm
