// Failures of calls on a device that more than one part of the engine finds.
#pragma once

#include <optional>
#include <string>

#include "engine/communicator.h"

namespace pipecomm {

// The communicator has failed.
[[noreturn]] inline void throw_failure(const Communicator& communicator) {
  throw PipeCommException(communicator.failure());
}

inline Failure closed_failure(const Communicator& communicator, OpCode op, int peer) {
  return {.kind = FailureKind::peer_lost,
          .message = std::string(op_name(op)) + ": rank " + std::to_string(peer) +
                     " has closed its communicator",
          .op = op_name(op),
          .rank = communicator.rank(),
          .peer = peer,
          .origin_rank = peer};
}

// A call that waits on the host since `begin` has passed its deadline. `peer`: for which one, if it is
// one.
[[noreturn]] inline void fail_late(Communicator& communicator, OpCode op, Clock::time_point begin,
                                   Deadline deadline, const std::string& what,
                                   std::optional<int> peer) {
  Failure failure = communicator.own_failure(
      FailureKind::timeout,
      std::string(op_name(op)) + " timed out after " + seconds_text(Clock::now() - begin) +
          " (limit " + seconds_text(deadline - begin) + "), " + what +
          (peer ? "; rank " + std::to_string(*peer) + " " + communicator.describe_peer(*peer)
                : "") +
          "; check that the other ranks make their communicators and call the matching operation, "
          "or increase timeout=",
      op_name(op));
  failure.peer = peer.value_or(failure.peer);
  communicator.fail(std::move(failure));
  throw_failure(communicator);
}

}  // namespace pipecomm
