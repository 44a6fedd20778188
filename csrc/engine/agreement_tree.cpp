#include "engine/agreement_tree.h"

#include "plan/signature.h"

namespace pipecomm {

void Statement::add(int rank, const Request& request) {
  const bool sends = request.direction == Direction::send;
  Signature hash;
  hash.add(sends ? rank : request.peer).add(sends ? request.peer : rank);
  hash.add(static_cast<int64_t>(request.descriptor.digest()));
  balance += sends ? hash.value() : -hash.value();
}

void Statement::join(const Statement& other) {
  balance += other.balance;
  objects |= other.objects | (common != other.common ? 1 : 0);
}

std::vector<AgreementTree::Message> AgreementTree::start(const Statement& own) {
  joined_ = own;
  return go_on();
}

std::vector<AgreementTree::Message> AgreementTree::hear(int from, const Statement& statement) {
  if (from != place_.parent) {
    --num_missing_;
    joined_.join(statement);
    return go_on();
  }
  std::vector<Message> messages;
  if (verdict_) return messages;
  // If the parent is lost, its verdict may come before this member has sent its statement.
  if (!has_spoken_) messages.push_back({place_.parent, Statement::objection(joined_.common)});
  has_spoken_ = true;
  decide(statement, messages);
  return messages;
}

std::vector<AgreementTree::Message> AgreementTree::go_on() {
  std::vector<Message> messages;
  if (has_spoken_ || num_missing_ > 0) return messages;
  if (place_.is_root()) {
    decide(joined_, messages);
  } else {
    has_spoken_ = true;
    messages.push_back({place_.parent, joined_});
  }
  return messages;
}

void AgreementTree::decide(const Statement& verdict, std::vector<Message>& messages) {
  verdict_ = verdict.objects == 0 && verdict.balance == 0;
  const Statement word{verdict.common, 0, *verdict_ ? uint64_t{0} : uint64_t{1}};
  for (const int child : place_.children) messages.push_back({child, word});
}

}  // namespace pipecomm
