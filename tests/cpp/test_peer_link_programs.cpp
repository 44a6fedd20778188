// Random programs of two ranks over two PeerLinks: the outcome of every message depends only on the two
// programs, at any timing.
#include "link_pair.h"

enum class Fault { none, size, dtype, shape, signature, op };

struct Message {
  int channel;
  int64_t num_bytes;
  Fault fault;  // in what the receiver expects
  bool send_refuses, recv_refuses;
};

Descriptor expected_descriptor(const Message& message) {
  Descriptor descriptor = make_descriptor(message.channel, message.num_bytes);
  if (message.fault == Fault::size)
    descriptor.num_bytes = message.num_bytes == 0 ? 1 : message.num_bytes / 2;
  if (message.fault == Fault::dtype) descriptor.dtype = dtypes::kBFloat16.code;
  if (message.fault == Fault::shape) {
    descriptor.num_dims = 2;
    descriptor.shape[1] = 1;
  }
  if (message.fault == Fault::signature) descriptor.signature = 99;
  if (message.fault == Fault::op) descriptor.op = OpCode::relay;
  return descriptor;
}

// Collectives have other shapes on every rank: only p2p compares dtypes and shapes.
bool disagrees(const Message& message) {
  if (message.fault == Fault::none) return false;
  const bool of_tensor = message.fault == Fault::dtype || message.fault == Fault::shape;
  return !of_tensor || message.channel != kCollectiveChannel;
}

Message random_message(Random& random) {
  constexpr int kChannels[] = {0, 1, 3, kCollectiveChannel};
  constexpr int64_t kSizes[] = {0, 1, 100, kMaxInlineBytes - 1, kMaxInlineBytes};
  Message message{kChannels[random.between(0, 3)], 0, Fault::none, false, false};
  message.num_bytes = random.chance(0.4) ? kMaxInlineBytes + random.between(1, 1000)
                                         : kSizes[random.between(0, random.chance(0.9) ? 2 : 4)];
  if (random.chance(0.15)) message.fault = static_cast<Fault>(random.between(1, 5));
  if (message.channel == kCollectiveChannel) {
    message.send_refuses = random.chance(0.1);
    message.recv_refuses = random.chance(0.1);
  }
  return message;
}

enum class End { close, goodbye, loss, failure };

struct Case {
  std::deque<std::pair<Direction, Message>> program[2];     // in posting order
  std::map<int, std::vector<EntryPtr>> sends[2], recvs[2];  // by channel, posted
  std::map<int, std::vector<Message>> messages[2];          // by channel, from that rank
};

std::string refusal_text(int rank, Direction direction) {
  return "rank " + std::to_string(rank) + (direction == Direction::send ? " sends" : " expects") +
         " no such thing";
}

Case random_case(Random& random) {
  Case result;
  const int64_t num_messages = random.between(0, 60);
  for (int64_t idx = 0; idx < num_messages; ++idx) {
    const Message message = random_message(random);
    const int sender = int(random.between(0, 1));
    result.messages[sender][message.channel].push_back(message);
    // Without its other half the message stays alone, and moves the partners of those after it:
    // only at the end of a channel, which random truncation by closing gives.
    result.program[sender].push_back({Direction::send, message});
    result.program[1 - sender].push_back({Direction::recv, message});
  }
  // Ranks post in orders of their own, except within a channel and direction.
  for (auto& program : result.program) {
    for (size_t idx = 1; idx < program.size(); ++idx) {
      if (!random.chance(0.5)) continue;
      auto& before = program[idx - 1];
      auto& after = program[idx];
      if (before.first != after.first || before.second.channel != after.second.channel)
        std::swap(before, after);
    }
  }
  return result;
}

void post_next(Pair& pair, Case& plan, int rank) {
  auto [direction, message] = plan.program[rank].front();
  plan.program[rank].pop_front();
  const bool sends = direction == Direction::send;
  const bool refuses = sends ? message.send_refuses : message.recv_refuses;
  Descriptor descriptor =
      sends ? make_descriptor(message.channel, message.num_bytes) : expected_descriptor(message);
  if (refuses) descriptor.num_bytes = 0;
  const EntryPtr entry =
      pair.post(rank, direction, descriptor, refuses ? refusal_text(rank, direction) : "");
  (sends ? plan.sends : plan.recvs)[rank][message.channel].push_back(entry);
}

// Checks the outcome of a message whose two halves were both posted.
void check_met(const Message& message, int sender, const Entry& send, const Entry& recv) {
  const int receiver = 1 - sender;
  const auto untouched = [&] {
    return std::ranges::all_of(recv.memory, [](std::byte byte) { return byte == std::byte{0xee}; });
  };
  if (message.send_refuses) {
    CHECK(send.succeeded());
    if (message.recv_refuses) {
      CHECK(recv.succeeded());
    } else {
      check_failure(recv, receiver, FailureKind::mismatch, sender,
                    refusal_text(sender, Direction::send));
    }
    CHECK(untouched());
  } else if (message.recv_refuses) {
    CHECK(recv.succeeded());
    check_failure(send, sender, FailureKind::mismatch, receiver,
                  refusal_text(receiver, Direction::recv));
  } else if (disagrees(message)) {
    check_failure(recv, receiver, FailureKind::mismatch, receiver, send.request->descriptor.text());
    check_failure(send, sender, FailureKind::mismatch, receiver, recv.request->descriptor.text());
    CHECK(untouched());
  } else {
    CHECK(send.succeeded() && recv.succeeded());
    CHECK(recv.memory == send.memory);
  }
}

template <class Visit>
void for_each_message(const Case& plan, const Visit& visit) {
  for (int sender : {0, 1}) {
    for (const auto& [channel, messages] : plan.messages[sender]) {
      auto entry = [&](const auto& all, int rank, size_t idx) -> const Entry* {
        const auto found = all[rank].find(channel);
        if (found == all[rank].end() || idx >= found->second.size()) return nullptr;
        return found->second[idx].get();
      };
      for (size_t idx = 0; idx < messages.size(); ++idx)
        visit(messages[idx], sender, entry(plan.sends, sender, idx),
              entry(plan.recvs, 1 - sender, idx));
    }
  }
}

// Both ranks close at some point of their program, and all unfinished messages end as they must.
void check_closed(const Case& plan) {
  for_each_message(
      plan, [](const Message& message, int sender, const Entry* send, const Entry* recv) {
        if (send && recv) {
          check_met(message, sender, *send, *recv);
        } else if (send && send->request->descriptor.op == OpCode::p2p) {
          check_failure(*send, sender, FailureKind::peer_lost, 1 - sender, kClosedText);
        } else if (send) {
          check_failure(*send, sender, FailureKind::mismatch, 1 - sender, kClosedText);
        } else if (recv) {
          check_failure(*recv, 1 - sender, FailureKind::peer_lost, sender, kClosedText);
        }
      });
}

// Cut off anywhere: every request ends as it must have, or because the peer is gone.
void check_cut(const Case& plan) {
  for_each_message(
      plan, [](const Message& message, int sender, const Entry* send, const Entry* recv) {
        for (const auto& [entry, rank] : {std::pair{send, sender}, std::pair{recv, 1 - sender}}) {
          if (!entry || entry->dropped) continue;
          CHECK_EQ(entry->num_outcomes, 1);
          if (!entry->failure) continue;
          if (entry->failure->kind == FailureKind::peer_lost)
            check_failure(*entry, rank, FailureKind::peer_lost, 1 - rank, "cannot complete");
          else if (!message.send_refuses && !message.recv_refuses && !disagrees(message))
            check_failure(*entry, rank, FailureKind::mismatch, 1 - rank, kClosedText);
        }
        if (recv && recv->succeeded() && !message.recv_refuses && !message.send_refuses) {
          CHECK(send != nullptr && !disagrees(message));
          if (send) CHECK(recv->memory == send->memory);
        }
        if (send && send->succeeded() && !message.send_refuses)
          CHECK(recv && recv->succeeded() && !message.recv_refuses);
      });
}

void run_program(int seed, End end) {
  check::context = "program, seed " + std::to_string(seed) + ", end " + std::to_string(int(end));
  Random random(seed);
  Case plan = random_case(random);
  Pair pair;
  bool closed[2] = {false, false};
  // Some programs break off early, most run to their end.
  const bool breaks_off = random.chance(0.4);
  int64_t steps_left = breaks_off ? random.between(1, 150) : INT64_MAX;
  const double haste = random.chance(0.5) ? 0.2 : 0.7;  // how readily messages are posted
  while (!(plan.program[0].empty() && plan.program[1].empty()) && steps_left-- > 0) {
    const int rank = int(random.between(0, 1));
    if (random.chance(haste)) {
      if (!plan.program[rank].empty()) post_next(pair, plan, rank);
      if (end == End::close && breaks_off && !closed[rank] && random.chance(0.02)) {
        closed[rank] = true;
        plan.program[rank].clear();  // it posts nothing more
        pair.link(rank).say_closing();
      }
    } else if (random.chance(0.3)) {
      pair.flush(rank);
    } else if (random.chance(0.6)) {
      pair.deliver(rank);
    } else {
      pair.move_body(random);
    }
  }
  const int first = int(random.between(0, 1));
  switch (end) {
    case End::close:
      for (int rank : {first, 1 - first}) {
        pair.link(rank).say_closing();
        pair.link(rank).say_closing();
        if (random.chance(0.5)) pair.run_to_quiet(random);
      }
      pair.run_to_quiet(random);
      check_closed(plan);
      for (int rank : {0, 1}) CHECK(pair.link(rank).state() == PeerLink::State::closing);
      for (int rank : {first, 1 - first}) {
        CHECK(!pair.link(rank).goodbye_answered());
        pair.link(rank).say_goodbye();
        pair.run_to_quiet(random);
        CHECK(pair.link(rank).goodbye_answered());
        CHECK(pair.link(1 - rank).state() == PeerLink::State::disconnecting);
      }
      break;
    case End::goodbye:  // without waiting for anything, as a communicator that is dropped
      pair.link(first).say_closing();
      pair.link(first).say_goodbye();
      pair.run_to_quiet(random);
      CHECK(pair.link(first).goodbye_answered());
      break;
    case End::loss:
      break;
    case End::failure: {
      const Failure failure{.kind = FailureKind::timeout, .message = "too late", .rank = first};
      pair.link(first).say_failure(failure);
      pair.flush(first);
      pair.drop(first);
      while (pair.deliver(first)) {
      }
      const auto heard = pair.link(1 - first).failure();
      CHECK(heard && heard->message == "too late" && heard->kind == FailureKind::timeout);
      pair.drop(1 - first);
      // Later arrivals and posts have no owner.
      pair.run_to_quiet(random);
      break;
    }
  }
  pair.cut_wire();
  for (int rank : {1 - first, first}) {
    if (!plan.program[rank].empty() && end != End::failure) post_next(pair, plan, rank);
    pair.lose(rank);
    CHECK(pair.link(rank).state() == PeerLink::State::lost);
    pair.lose(rank);
  }
  // A late post finds a message that has arrived before, or that the peer is gone.
  if (end == End::goodbye || end == End::loss)
    for (int rank : {0, 1})
      while (!plan.program[rank].empty()) post_next(pair, plan, rank);
  if (end != End::close) check_cut(plan);
  for (int rank : {0, 1}) {
    CHECK_EQ(pair.num_pending(rank), 0u);
    pair.drop(rank);
  }
  CHECK_EQ(pair.num_retained(), 0u);
}

TEST(random_programs) {
  for (int seed = 0; seed < check::rounds(600); ++seed)
    for (End end : {End::close, End::goodbye, End::loss, End::failure}) run_program(seed, end);
}
