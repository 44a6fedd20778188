// The members of a collective check that all of them make the same call, with one small message per
// edge of their tree and direction: statements are joined on the way to the root, which returns a
// verdict. Pure logic, one object for each member and collective.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "message/operation.h"
#include "transport/group_tree.h"

namespace pipecomm {

// The joint statement of some members about one collective, as it is sent.
struct Statement {
  uint64_t common = 0;  // a hash of what all members must share
  // Over all messages of these members: a hash of each, added by its sender and subtracted by its
  // receiver. Over all members it is 0 if the two ends of every message agree.
  uint64_t balance = 0;
  // Not 0 if a member refuses or cannot be reached, or members differ in `common`. As a verdict:
  // the members do not agree, and exchange messages directly to find out what is wrong.
  uint64_t objects = 0;

  // `request` is a message that this member sends or expects from now on.
  void add(int rank, const Request& request);
  void join(const Statement& other);
  static Statement objection(uint64_t common) { return {common, 0, 1}; }
};

class AgreementTree {
 public:
  explicit AgreementTree(const TreePlace& place)
      : place_(place), num_missing_(place.children.size()) {}

  struct Message {
    int to;  // a member
    Statement statement;
  };
  // Return the messages to send: start() after this member's own statement, hear() after that of a
  // child or the verdict of the parent. Each edge always carries one message in each direction.
  std::vector<Message> start(const Statement& own);
  std::vector<Message> hear(int from, const Statement& statement);

  // Whether all members agree; none until this member knows it.
  std::optional<bool> verdict() const { return verdict_; }

 private:
  std::vector<Message> go_on();
  void decide(const Statement& verdict, std::vector<Message>& messages);

  TreePlace place_;
  size_t num_missing_;       // children whose statement has not come
  bool has_spoken_ = false;  // to the parent
  Statement joined_;
  std::optional<bool> verdict_;
};

}  // namespace pipecomm
