#include "message/matching.h"

namespace pipecomm {
namespace {

std::shared_ptr<Failure> failure_of(FailureKind kind, int rank, const Request& request) {
  auto failure = std::make_shared<Failure>();
  failure->kind = kind;
  failure->rank = rank;
  name_message(*failure, request.peer, request.descriptor);
  return failure;
}

}  // namespace

Meeting meet(const Request& recv, bool message_refuses, const Descriptor& message) {
  if (message_refuses) return Meeting::peer_refuses;
  if (recv.refuses) return Meeting::self_refuses;
  return recv.descriptor.agrees_with(message) ? Meeting::agree : Meeting::disagree;
}

FailurePtr mismatch_failure(int rank, const Request& request, const Descriptor& theirs) {
  auto failure = failure_of(FailureKind::mismatch, rank, request);
  const bool sends = request.direction == Direction::send;
  failure->origin_rank = sends ? request.peer : rank;
  failure->message = disagreement_text(request.direction, request.peer, request.descriptor, theirs);
  failure->message += "; nothing was transferred; make the two calls agree";
  failure->ours = description_of(request.descriptor);
  failure->theirs = description_of(theirs);
  return failure;
}

FailurePtr refusal_failure(int rank, const Request& request, std::string_view reason) {
  auto failure = failure_of(FailureKind::mismatch, rank, request);
  failure->origin_rank = request.peer;
  failure->message = std::string(op_name(request.descriptor.op)) + " was refused by rank " +
                     std::to_string(request.peer) + ": " + std::string(reason);
  return failure;
}

FailurePtr gone_failure(int rank, const Request& request, const std::string& peer_text) {
  auto failure = failure_of(FailureKind::peer_lost, rank, request);
  failure->origin_rank = request.peer;
  failure->message = request_text(request) + " of " + request.descriptor.text() +
                     " cannot complete: rank " + std::to_string(request.peer) + " " + peer_text;
  return failure;
}

FailurePtr refused_send_failure(int rank, const Request& send, std::string_view reason,
                                const std::string& peer_text) {
  return send.descriptor.op == OpCode::p2p ? gone_failure(rank, send, peer_text)
                                           : refusal_failure(rank, send, reason);
}

}  // namespace pipecomm
