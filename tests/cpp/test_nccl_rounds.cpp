// Rounds that are the same on both ends, and message checks that find disagreements.

#include "check.h"
#include "engine/device/message_check.h"
#include "engine/point_to_point.h"
#include "transport/nccl/nccl_rounds.h"

using Rounds = std::vector<std::vector<DeviceMessage>>;

std::byte* const kBase = reinterpret_cast<std::byte*>(uintptr_t{1} << 40);

int64_t total_bytes(const Rounds& rounds) {
  int64_t total = 0;
  for (const auto& round : rounds)
    for (const DeviceMessage& message : round) total += message.num_bytes;
  return total;
}

// Runs the rounds of all ranks, one after the other on each, with messages that need both ends at
// once: true if all finish.
bool completes(const std::vector<Rounds>& rounds) {
  const int size = int(rounds.size());
  std::vector<size_t> at(size, 0);
  std::vector<std::map<std::pair<int, Direction>, int>> pending(size);  // of the current round
  auto enter = [&](int rank) {
    if (at[rank] < rounds[rank].size())
      for (const DeviceMessage& message : rounds[rank][at[rank]])
        ++pending[rank][{message.peer, message.direction}];
  };
  for (int rank = 0; rank < size; ++rank) enter(rank);
  for (bool moved = true; moved;) {
    moved = false;
    for (int source = 0; source < size; ++source) {
      for (int destination = 0; destination < size; ++destination) {
        int& sends = pending[source][{destination, Direction::send}];
        int& recvs = pending[destination][{source, Direction::recv}];
        const int matched = std::min(sends, recvs);
        sends -= matched;
        recvs -= matched;
      }
    }
    for (int rank = 0; rank < size; ++rank) {
      const bool done = std::all_of(pending[rank].begin(), pending[rank].end(),
                                    [](const auto& entry) { return entry.second == 0; });
      if (!done || at[rank] == rounds[rank].size()) continue;
      ++at[rank];
      enter(rank);
      moved = true;
    }
  }
  for (int rank = 0; rank < size; ++rank)
    if (at[rank] != rounds[rank].size()) return false;
  return true;
}

TEST(rounds_agree_on_both_ends) {
  std::mt19937 random(1);
  auto pick = [&](int low, int high) {
    return std::uniform_int_distribution<int>(low, high)(random);
  };
  for (int case_idx = 0; case_idx < 400; ++case_idx) {
    const int size = pick(2, 9), max_ops = pick(2, 70);
    check::context = "case " + std::to_string(case_idx);
    std::vector<std::vector<DeviceMessage>> batches(size);
    int64_t sent = 0;
    for (int source = 0; source < size; ++source) {
      for (int destination = 0; destination < size; ++destination) {
        if (source == destination) continue;
        const int num_messages = pick(0, 3) == 0 ? pick(0, 40) : pick(0, 2);
        for (int idx = 0; idx < num_messages; ++idx) {
          const int64_t num_bytes = pick(0, 9) == 0    ? 0
                                    : pick(0, 30) == 0 ? kMaxPieceBytes * 2 + 5
                                                       : pick(1, 4096);
          batches[source].push_back({Direction::send, destination, kBase, num_bytes});
          batches[destination].push_back({Direction::recv, source, kBase, num_bytes});
          sent += num_bytes;
        }
      }
    }
    std::vector<Rounds> rounds;
    int64_t cut = 0;
    for (int rank = 0; rank < size; ++rank) {
      // The caller may choose any order across peers.
      std::stable_sort(batches[rank].begin(), batches[rank].end(),
                       [&](const auto& a, const auto& b) {
                         return (a.peer * 7 + case_idx) % size < (b.peer * 7 + case_idx) % size;
                       });
      rounds.push_back(cut_rounds(batches[rank], rank, size, max_ops));
      cut += total_bytes(rounds.back());
      for (const auto& round : rounds.back()) {
        CHECK(!round.empty() && int(round.size()) <= max_ops);
        for (const DeviceMessage& piece : round)
          CHECK(piece.num_bytes > 0 && piece.num_bytes <= kMaxPieceBytes);
      }
    }
    CHECK_EQ(cut, 2 * sent);
    CHECK(completes(rounds));
  }
}

TEST(pieces_are_in_order) {
  const std::vector<DeviceMessage> batch{{Direction::send, 1, kBase, 2 * kMaxPieceBytes + 3},
                                         {Direction::send, 1, kBase, 0},
                                         {Direction::send, 1, kBase + 7, 1}};
  std::vector<std::pair<int64_t, int64_t>> pieces;
  for (const auto& round : cut_rounds(batch, 0, 2, 2))
    for (const DeviceMessage& piece : round)
      pieces.emplace_back(piece.data - kBase, piece.num_bytes);
  const std::vector<std::pair<int64_t, int64_t>> expected{
      {0, kMaxPieceBytes}, {kMaxPieceBytes, kMaxPieceBytes}, {2 * kMaxPieceBytes, 3}, {7, 1}};
  CHECK(pieces == expected);
}

Descriptor tensor_of(Dims shape, int channel = 0) {
  TensorRef tensor;
  tensor.dtype = dtypes::kFloat32;
  tensor.shape = std::move(shape);
  return describe(OpCode::p2p, channel, tensor, 0, tensor.num_bytes());
}

// Two ends that post and receive each other's claims.
struct Pair {
  explicit Pair(Check check) : sender(2, 2, check), receiver(2, 2, check) {}
  MessageCheck sender, receiver;
  int num_claims = 0;

  std::optional<MessageCheck::Mismatch> send(Dims shape) {
    return post(sender, receiver, 1, Direction::send, tensor_of(std::move(shape)));
  }
  std::optional<MessageCheck::Mismatch> recv(Dims shape) {
    return post(receiver, sender, 0, Direction::recv, tensor_of(std::move(shape)));
  }

 private:
  std::optional<MessageCheck::Mismatch> post(MessageCheck& here, MessageCheck& there, int peer,
                                             Direction direction, const Descriptor& descriptor) {
    MessageCheck::Posted posted;
    here.post(peer, direction, descriptor, false, posted);
    if (posted.mismatch) return posted.mismatch;
    num_claims += int(posted.announcements.size());
    for (const auto& each : posted.announcements)
      if (auto mismatch = there.receive(1 - peer, direction, each.descriptor)) return mismatch;
    return std::nullopt;
  }
};

TEST(claims_are_made_once) {
  Pair pair(Check::first_use);
  for (int idx = 0; idx < 1000; ++idx) {
    CHECK(!pair.send({4, Dims::value_type(idx % 2)}));
    CHECK(!pair.recv({4, Dims::value_type(idx % 2)}));
  }
  CHECK_EQ(pair.num_claims, 4);
  CHECK(pair.sender.is_known(1, Direction::send, tensor_of({4, 1})));
  CHECK(!pair.sender.is_known(1, Direction::send, tensor_of({4, 2})));
  CHECK(!pair.sender.is_known(1, Direction::send, tensor_of({4, 1}, 1)));
  CHECK(!pair.sender.is_known(1, Direction::recv, tensor_of({4, 1})));
}

TEST(disagreements_are_found) {
  {  // the receiver comes later
    Pair pair(Check::first_use);
    CHECK(!pair.send({4}));
    const auto mismatch = pair.recv({5});
    CHECK(mismatch && mismatch->ours.shape[0] == 5 && mismatch->theirs.shape[0] == 4);
  }
  {  // the sender comes later, with a shape that is new to it alone
    Pair pair(Check::first_use);
    for (int idx = 0; idx < 3; ++idx) CHECK(!pair.send({4}) && !pair.recv({4}));
    CHECK(!pair.recv({4}));
    const auto mismatch = pair.send({6});
    CHECK(mismatch && mismatch->direction == Direction::recv && mismatch->ours.seq == 3 &&
          mismatch->ours.shape[0] == 4 && mismatch->theirs.shape[0] == 6);
  }
  {  // known shapes, swapped: only a full check can see it
    Pair seldom(Check::first_use), full(Check::full);
    for (Pair* pair : {&seldom, &full}) {
      CHECK(!pair->send({4}) && !pair->send({6}) && !pair->recv({4}) && !pair->recv({6}));
      CHECK(!pair->send({4}));
    }
    CHECK(!seldom.recv({6}));
    CHECK(full.recv({6}));
  }
  {  // off
    Pair pair(Check::off);
    CHECK(!pair.send({4}) && !pair.recv({5}));
    CHECK_EQ(pair.num_claims, 0);
  }
  {  // nonsense from the wire
    MessageCheck check(2, 2, Check::full);
    CHECK(!check.receive(7, Direction::send, tensor_of({4})));
    CHECK(!check.receive(1, Direction::send, tensor_of({4}, 9)));
  }
}
