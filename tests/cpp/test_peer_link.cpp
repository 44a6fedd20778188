// Two PeerLinks joined by a wire in memory that keeps only the order of packets. The outcome of
// every message depends only on the two programs, at any timing.

#include "check.h"
#include "plan/dtype.h"
#include "transport/tcp/peer_link.h"
#include "transport/tcp/wire.h"
#include "world.h"

using wire::Kind;
using world::Random;

using Bytes = std::vector<std::byte>;

constexpr uint32_t kEpoch = 77;
// The promise to receivers: how many messages of a channel they may have to keep unmatched.
constexpr size_t kWindowRecords = 4096;
constexpr int64_t kWindowBytes = 4 << 20;
constexpr const char* kClosedText = "has closed its communicator";

Descriptor make_descriptor(int channel, int64_t num_bytes) {
  Descriptor descriptor;
  descriptor.op = channel == kCollectiveChannel ? OpCode::exchange : OpCode::p2p;
  descriptor.channel = uint8_t(channel);
  descriptor.num_bytes = num_bytes;
  descriptor.num_dims = 1;
  descriptor.shape[0] = num_bytes;
  return descriptor;
}

// The payload of message `seq` of a rank on a channel.
std::byte byte_of(int rank, int channel, uint64_t seq, size_t idx) {
  return static_cast<std::byte>((idx * 7 + seq * 31 + channel * 101 + rank * 11 + 5) & 0xff);
}

// A request of the program, and its outcome.
struct Entry {
  RequestPtr request;
  Bytes memory;
  int num_outcomes = 0;
  bool dropped = false;
  FailurePtr failure;

  bool succeeded() const { return num_outcomes == 1 && !failure; }
};
using EntryPtr = std::shared_ptr<Entry>;

// Both ranks, and the wire between them.
class Pair {
 public:
  Pair() {
    for (int rank : {0, 1})
      sides_[rank].link =
          std::make_unique<PeerLink>(rank, 1 - rank, kEpoch, [this, rank](Bytes packet) {
            CHECK(packet.size() <= wire::kMaxPacketBytes);
            ++sides_[rank].num_packets_sent;
            note_sent(rank, packet);
            if (!cut_) sides_[rank].wire.push_back(std::move(packet));
          });
  }

  PeerLink& link(int rank) { return *sides_[rank].link; }
  bool cut() const { return cut_; }
  uint64_t num_packets_sent(int rank) const { return sides_[rank].num_packets_sent; }

  EntryPtr post(int rank, Direction direction, const Descriptor& descriptor,
                const std::string& refusal = "") {
    Side& side = sides_[rank];
    const auto entry = std::make_shared<Entry>();
    entry->request = make_request(direction, 1 - rank, descriptor, nullptr);
    Request& request = *entry->request;
    request.refuses = !refusal.empty();
    request.refusal = refusal;
    entry->memory.assign(size_t(descriptor.num_bytes), std::byte{0xee});
    request.data = entry->memory.data();
    side.link->number(request);
    if (direction == Direction::send)
      for (size_t idx = 0; idx < entry->memory.size(); ++idx)
        entry->memory[idx] = byte_of(rank, descriptor.channel, request.descriptor.seq, idx);
    side.entries[entry->request.get()] = entry;
    if (has_body(request)) CHECK(request.descriptor.num_bytes > kMaxInlineBytes);
    side.link->post(entry->request);
    settle(rank);
    return entry;
  }

  void flush(int rank) {
    link(rank).flush();
    settle(rank);
  }

  // The next packet of the wire from `rank`; false if there is none.
  bool deliver(int rank) {
    std::deque<Bytes>& wire = sides_[rank].wire;
    if (wire.empty()) return false;
    Bytes packet = std::move(wire.front());
    wire.pop_front();
    packet.resize(wire::kMaxPacketBytes, std::byte{0xdd});
    link(1 - rank).handle_packet(packet);
    std::fill(packet.begin(), packet.end(), std::byte{0xcc});  // the slot is used again
    settle(1 - rank);
    return true;
  }

  // Moves one piece of a body that its receiver stands ready for, behind all packets that precede it;
  // false for none.
  bool move_body(Random& random) {
    if (cut_) return false;
    const int rank = int(random.between(0, 1));
    return move_body_of(rank, random) || move_body_of(1 - rank, random);
  }
  bool move_body_of(int rank, Random& random) {
    flush(rank);
    Side& side = sides_[rank];
    if (side.bodies.empty()) return false;
    while (deliver(rank)) {
    }
    auto& [send, num_sent] = side.bodies.front();
    if (sides_[rank].entries.at(send.get())->dropped) return side.bodies.pop_front(), true;
    const Descriptor& descriptor = send->descriptor;
    if (num_sent == 0)  // that its receiver stands ready is the answer to its announcement
      CHECK_EQ(side.unanswered[descriptor.channel].erase(descriptor.seq), 1u);
    const int64_t left = descriptor.num_bytes - num_sent;
    const auto num_bytes = uint32_t(random.chance(0.3) ? random.between(1, left) : left);
    const auto place = link(1 - rank).place_for(descriptor.channel, descriptor.seq, num_bytes);
    std::copy_n(send->data + num_sent, place.size(), place.data());
    link(1 - rank).piece_arrived(descriptor.channel, descriptor.seq);
    settle(1 - rank);
    num_sent += num_bytes;
    if (num_sent == descriptor.num_bytes) {
      link(rank).body_gone(send);
      side.bodies.pop_front();
    }
    settle(rank);
    return true;
  }

  // The connection is gone: no packet and no body any more.
  void cut_wire() {
    cut_ = true;
    for (Side& side : sides_) side.wire.clear();
  }

  void lose(int rank) {
    link(rank).lose();
    settle(rank);
  }

  void drop(int rank) {
    for (const RequestPtr& request : link(rank).drop()) {
      const auto found = sides_[rank].entries.find(request.get());
      CHECK(found != sides_[rank].entries.end());
      CHECK_EQ(found->second->num_outcomes, 0);
      found->second->dropped = true;
    }
  }

  // Delivers everything that is in flight.
  void run_to_quiet(Random& random) {
    for (bool busy = true; busy;) {
      busy = false;
      for (int rank : {0, 1}) {
        flush(rank);
        busy |= deliver(rank);
      }
      busy |= move_body(random);
    }
  }

  size_t num_pending(int rank) const {
    size_t count = 0;
    for (const auto& [request, entry] : sides_[rank].entries)
      count += entry->num_outcomes == 0 && !entry->dropped;
    return count;
  }
  // On one channel in one direction, as the peers see it on the wire.
  size_t most_unanswered() const { return most_unanswered_; }

  // The requests that anything but the caller and this object still holds, after the end.
  size_t num_retained() {
    for (Side& side : sides_) side.bodies.clear();
    size_t count = 0;
    for (const Side& side : sides_)
      for (const auto& [request, entry] : side.entries) count += entry->request.use_count() > 1;
    return count;
  }

 private:
  struct Side {
    std::unique_ptr<PeerLink> link;
    std::deque<Bytes> wire;  // packets from here
    // Bodies that leave from here, and how much of them has left.
    std::deque<std::pair<RequestPtr, int64_t>> bodies;
    uint64_t num_packets_sent = 0;
    std::map<Request*, EntryPtr> entries;
    // Message records by channel and number, with the bytes that they carry.
    std::map<int, std::set<uint64_t>> unanswered;
  };

  void settle(int rank) {
    for (const PeerLink::Outcome& outcome : link(rank).take_outcomes()) {
      const auto found = sides_[rank].entries.find(outcome.request.get());
      CHECK(found != sides_[rank].entries.end());
      Entry& entry = *found->second;
      CHECK(!entry.dropped);
      CHECK_EQ(++entry.num_outcomes, 1);
      entry.failure = outcome.failure;
    }
    for (const RequestPtr& request : link(rank).take_departing()) {
      CHECK(has_body(*request) && request->direction == Direction::send);
      sides_[rank].bodies.emplace_back(request, 0);
    }
  }

  // Follows the messages and answers on the wire, to see how much is unanswered per channel.
  void note_sent(int rank, const Bytes& packet) {
    const wire::PacketReader reader(packet, kEpoch);
    for (const wire::Record& record : reader.records()) {
      const auto& [kind, channel, seq] =
          std::tuple(record.header.kind, int{record.header.channel}, record.header.seq);
      const auto is_one_of = [kind](std::initializer_list<Kind> kinds) {
        return std::ranges::find(kinds, kind) != kinds.end();
      };
      if (is_one_of({Kind::data, Kind::announce, Kind::refuse})) {
        auto& unanswered = sides_[rank].unanswered[channel];
        CHECK(unanswered.insert(seq).second);
        most_unanswered_ = std::max(most_unanswered_, unanswered.size());
      }
      const bool answers_goodbye = seq == UINT64_MAX;
      if (is_one_of({Kind::accept, Kind::reject, Kind::refused}) && !answers_goodbye)
        CHECK_EQ(sides_[1 - rank].unanswered[channel].erase(seq), 1u);  // each is answered once
    }
  }

  Side sides_[2];
  bool cut_ = false;
  size_t most_unanswered_ = 0;
};

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

void check_failure(const Entry& entry, int rank, FailureKind kind, int origin,
                   const std::string& text) {
  CHECK_EQ(entry.num_outcomes, 1);
  CHECK(entry.failure != nullptr);
  if (!entry.failure) return;
  CHECK(entry.failure->kind == kind);
  CHECK_EQ(entry.failure->rank, rank);
  CHECK_EQ(entry.failure->peer, 1 - rank);
  CHECK_EQ(entry.failure->origin_rank, origin);
  CHECK_EQ(entry.failure->channel, int{entry.request->descriptor.channel});
  CHECK_EQ(entry.failure->seq, int64_t(entry.request->descriptor.seq));
  CHECK_CONTAINS(entry.failure->message, text);
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

void check_window(int64_t num_bytes) {
  const size_t window = std::min(kWindowRecords, size_t(kWindowBytes / num_bytes));
  for (const bool closes : {false, true}) {
    check::context = closes ? "window, closing" : "window";
    Random random(3);
    Pair pair;
    const Descriptor large = make_descriptor(0, num_bytes);
    const Descriptor small = make_descriptor(1, 8);
    const int num_messages = int(window) + 500;
    std::vector<EntryPtr> recvs;
    for (int idx = 0; idx < num_messages; ++idx) pair.post(0, Direction::send, large);
    pair.run_to_quiet(random);
    CHECK_EQ(pair.most_unanswered(), window);
    CHECK_EQ(pair.num_pending(0), size_t(num_messages));

    // A channel whose messages are not received does not block others.
    pair.post(0, Direction::send, small);
    const EntryPtr other = pair.post(1, Direction::recv, small);
    pair.run_to_quiet(random);
    CHECK(other->succeeded());

    // Messages that wait for the window still arrive after their sender has announced its close.
    if (closes) pair.link(0).say_closing();
    for (int idx = 0; idx < num_messages; ++idx) {
      recvs.push_back(pair.post(1, Direction::recv, large));
      if (random.chance(0.02)) pair.run_to_quiet(random);
    }
    pair.run_to_quiet(random);
    for (int idx = 0; idx < num_messages; ++idx) {
      CHECK(recvs[idx]->succeeded());
      CHECK(recvs[idx]->memory[0] == byte_of(0, 0, idx, 0));
    }
    CHECK_EQ(pair.num_pending(0), 0u);
    CHECK_EQ(pair.most_unanswered(), window);
    CHECK(pair.link(1).state() == (closes ? PeerLink::State::closing : PeerLink::State::open));
  }
}

TEST(window) {
  for (const int64_t num_bytes :
       {int64_t{8}, kWindowBytes / int64_t{kWindowRecords}, kMaxInlineBytes})
    check_window(num_bytes);
}

// Messages of the control channel are never answered.
TEST(control_channel) {
  Descriptor word = make_descriptor(kControlChannel, 24), other = word;
  other.op = OpCode::relay;
  Pair pair;
  for (const bool early : {false, true}) {
    EntryPtr recv;
    if (!early) recv = pair.post(1, Direction::recv, word);
    const EntryPtr send = pair.post(0, Direction::send, word);
    CHECK(send->succeeded());  // before it has left
    pair.flush(0);
    CHECK(pair.deliver(0));
    if (early) recv = pair.post(1, Direction::recv, word);
    CHECK(recv->succeeded());
    CHECK(recv->memory == send->memory);
  }
  const EntryPtr send = pair.post(0, Direction::send, word);
  pair.flush(0);
  CHECK(pair.deliver(0));
  const EntryPtr recv = pair.post(1, Direction::recv, other);
  CHECK(recv->failure && recv->failure->kind == FailureKind::mismatch);
  CHECK(send->succeeded());
  pair.flush(1);
  CHECK_EQ(pair.num_packets_sent(1), 0u);
  pair.link(1).say_closing();
  for (int idx = 0; idx < 2; ++idx) CHECK(pair.post(0, Direction::send, word)->succeeded());
  const EntryPtr waiting = pair.post(0, Direction::recv, word);
  pair.flush(0);
  CHECK(pair.deliver(0));
  pair.flush(1);
  CHECK_EQ(pair.num_packets_sent(1), 1u);  // `closing`
  CHECK(pair.deliver(1));
  CHECK(waiting->failure && waiting->failure->kind == FailureKind::peer_lost);
}

// A receive that is there before the message calls for its body, which then needs no further packet;
// one that comes later does when the announcement meets it. Ends that disagree move nothing.
TEST(ready) {
  Random random(6);
  Pair pair;
  const auto check_packets = [&](int rank, uint64_t num_packets) {
    pair.flush(rank);
    CHECK_EQ(pair.num_packets_sent(rank), num_packets);
  };
  const Descriptor body = make_descriptor(0, kMaxInlineBytes + 1);
  const Descriptor other = make_descriptor(0, kMaxInlineBytes + 2);
  const EntryPtr early = pair.post(1, Direction::recv, body);
  check_packets(1, 1);
  CHECK(pair.deliver(1));
  const EntryPtr send = pair.post(0, Direction::send, body);
  while (pair.move_body_of(0, random)) {
  }
  CHECK(early->succeeded() && send->succeeded());
  check_packets(0, 1);
  check_packets(1, 1);

  pair.post(0, Direction::send, body);
  check_packets(0, 2);
  CHECK(pair.deliver(0));
  CHECK(!pair.move_body_of(0, random));
  const EntryPtr late = pair.post(1, Direction::recv, body);
  check_packets(1, 2);
  CHECK(pair.deliver(1));
  while (pair.move_body_of(0, random)) {
  }
  CHECK(late->succeeded());

  for (const bool is_early : {false, true}) {
    const EntryPtr wrong = pair.post(1, Direction::recv, other);
    if (is_early) pair.run_to_quiet(random);
    const EntryPtr refused = pair.post(0, Direction::send, body);
    pair.run_to_quiet(random);
    check_failure(*wrong, 1, FailureKind::mismatch, 1, "32.0 KiB");
    check_failure(*refused, 0, FailureKind::mismatch, 1, "32.0 KiB");
  }
  // Bodies of receives beyond the limit of `ready` records are requested when their messages come.
  std::vector<EntryPtr> recvs;
  for (size_t idx = 0; idx < kWindowRecords + 10; ++idx)
    recvs.push_back(pair.post(1, Direction::recv, body));
  pair.run_to_quiet(random);
  for (size_t idx = 0; idx < kWindowRecords + 10; ++idx) pair.post(0, Direction::send, body);
  pair.run_to_quiet(random);
  for (const EntryPtr& recv : recvs) CHECK(recv->succeeded());
}

// A body that was announced by a peer that has left since then never comes.
TEST(announced_by_a_peer_that_left) {
  Random random(5);
  Pair pair;
  const Descriptor body = make_descriptor(0, kMaxInlineBytes + 1);
  const Descriptor small = make_descriptor(0, 10);
  pair.post(0, Direction::send, small);
  pair.post(0, Direction::send, body);
  pair.link(0).say_closing();
  pair.link(0).say_goodbye();
  pair.run_to_quiet(random);
  pair.cut_wire();
  pair.lose(1);
  CHECK(pair.post(1, Direction::recv, small)->succeeded());
  check_failure(*pair.post(1, Direction::recv, body), 1, FailureKind::peer_lost, 0, kClosedText);
  check_failure(*pair.post(1, Direction::recv, body), 1, FailureKind::peer_lost, 0, kClosedText);
  check_failure(*pair.post(1, Direction::send, body), 1, FailureKind::peer_lost, 0, kClosedText);
}

class RawPeer {  // writes arbitrary records
 public:
  RawPeer() : link_(0, 1, kEpoch, [](Bytes) {}) {}
  PeerLink& link() { return link_; }
  void say(Kind kind, int channel, uint64_t seq, const Descriptor* descriptor, const Bytes& bytes) {
    writer_.add(kind, channel, seq, descriptor, bytes);
  }
  Bytes take(uint64_t number) { return writer_.take(kEpoch, number); }

 private:
  PeerLink link_;
  wire::PacketWriter writer_;
};
#define CHECK_REFUSED(peer, text, number) \
  CHECK_THROWS(std::runtime_error, text, peer.link().handle_packet(peer.take(number)))

TEST(protocol_violations) {
  const Descriptor small = make_descriptor(0, 4), large = make_descriptor(0, kMaxInlineBytes + 1);
  struct {
    const char* text;
    Kind kind;
    uint64_t seq;
    const Descriptor* descriptor;
    size_t num_bytes;
  } const violations[] = {
      {"message 1 of rank 1 on channel 0 came out of order", Kind::data, 1, &small, 4},
      {"answers a message that was never sent", Kind::accept, 0, nullptr, 0},
      {"malformed failure record", Kind::failure, 0, nullptr, 3},
      {"rank 1 sends 32.0 KiB inside a packet", Kind::data, 0, &large, kMaxInlineBytes + 1},
      {"rank 1 announces a message of only 4 B", Kind::announce, 0, &small, 0},
      {"text too long", Kind::refuse, 0, nullptr, wire::kMaxTextBytes + 1},
      {"text too long", Kind::refused, 0, nullptr, wire::kMaxTextBytes + 1},
  };
  for (const auto& [text, kind, seq, descriptor, num_bytes] : violations) {
    RawPeer peer;
    peer.say(kind, 0, seq, descriptor, Bytes(num_bytes));
    CHECK_REFUSED(peer, text, 1);
  }
  {
    RawPeer peer;
    peer.say(Kind::closing, 0, 0, nullptr, {});
    CHECK_REFUSED(peer, "packet 2 from rank 1 came after packet 0", 2);
  }
  {
    RawPeer peer;
    peer.say(Kind::closing, 0, 0, nullptr, {});
    peer.say(Kind::data, 0, 0, &small, Bytes(4));
    CHECK_REFUSED(peer, "sends a message after it has closed its communicator", 1);
  }
  {
    RawPeer peer;
    for (int times = 0; times < 2; ++times) peer.say(Kind::goodbye, 0, 0, nullptr, {});
    CHECK_REFUSED(peer, "rank 1 says goodbye twice", 1);
  }
  {  // bodies that were not requested, or of other lengths
    RawPeer peer;
    const auto expect_throw = [&](const char* text, int channel, uint64_t seq, uint32_t num_bytes) {
      CHECK_THROWS(std::runtime_error, text, peer.link().place_for(channel, seq, num_bytes));
    };
    expect_throw("rank 1 sends a body that is not expected", 0, 0, 10);
    Bytes memory(kMaxInlineBytes + 1);
    const RequestPtr recv = make_request(Direction::recv, 1, large, memory.data());
    peer.link().number(*recv);
    peer.link().post(recv);
    expect_throw("rank 1 sends a body that is not expected", 0, 0, 10);  // not announced
    peer.say(Kind::announce, 0, 0, &large, {});
    peer.link().handle_packet(peer.take(1));
    expect_throw("of another length than it has announced", 0, 0, kMaxInlineBytes + 2);
    expect_throw("of another length than it has announced", 0, 0, 0);
    CHECK_EQ(peer.link().place_for(0, 0, kMaxInlineBytes).size(), size_t{kMaxInlineBytes});
    peer.link().piece_arrived(0, 0);
    CHECK(peer.link().take_outcomes().empty());
    expect_throw("of another length than it has announced", 0, 0, 2);
    CHECK_EQ(peer.link().place_for(0, 0, 1).data(), memory.data() + kMaxInlineBytes);
    peer.link().piece_arrived(0, 0);
    CHECK_EQ(peer.link().take_outcomes().size(), 1u);
    expect_throw("rank 1 sends a body that is not expected", 0, 0, 1);
  }
  {
    RawPeer peer;
    for (uint64_t seq = 0; seq < kWindowRecords; ++seq) {
      peer.say(Kind::ready, 0, seq, &large, {});
      peer.link().handle_packet(peer.take(seq + 1));
    }
    peer.say(Kind::ready, 0, kWindowRecords, &large, {});
    CHECK_REFUSED(peer, "rank 1 is ready for more messages than it may be", kWindowRecords + 1);
  }
}

// The memory of messages without a receive is bounded by the rules, and the rules are enforced.
void check_sender_that_ignores_the_window(int64_t num_bytes) {
  RawPeer peer;
  const Descriptor descriptor = make_descriptor(0, num_bytes);
  uint64_t number = 0;
  const auto send = [&] {
    peer.say(Kind::data, 0, number, &descriptor, Bytes(size_t(num_bytes)));
    ++number;
  };
  while (number < kWindowRecords && number < uint64_t(kWindowBytes / num_bytes)) {
    send();
    peer.link().handle_packet(peer.take(number));
  }
  send();
  CHECK_REFUSED(peer, "rank 1 sends more than may wait for its receives", number);
}

TEST(a_sender_that_ignores_the_window) {
  for (const int64_t num_bytes : {int64_t{1}, kMaxInlineBytes})
    check_sender_that_ignores_the_window(num_bytes);
}

// A link either takes what a peer sends or throws, and still ends in order.
TEST(fuzz) {
  const int num_cases = check::rounds(3000);
  Random random(21);
  int num_taken = 0, num_refused = 0;
  for (int case_idx = 0; case_idx < num_cases; ++case_idx) {
    check::context = "fuzzed peer " + std::to_string(case_idx);
    RawPeer peer;
    std::vector<EntryPtr> entries;
    for (int64_t left = random.between(0, 6); left > 0; --left) {
      const auto entry = std::make_shared<Entry>();
      const auto direction = random.chance(0.5) ? Direction::send : Direction::recv;
      entry->request =
          make_request(direction, 1, make_descriptor(0, random.between(0, 3) * 20'000), nullptr);
      entry->memory.resize(size_t(entry->request->descriptor.num_bytes));
      entry->request->data = entry->memory.data();
      peer.link().number(*entry->request);
      peer.link().post(entry->request);
      entries.push_back(entry);
    }
    peer.link().flush();
    try {
      for (uint64_t number = 1; number <= 3; ++number) {
        for (int64_t left = random.between(1, 5); left > 0; --left) {
          const auto kind = static_cast<Kind>(random.between(1, 11));
          const Descriptor descriptor = make_descriptor(0, random.between(0, 3) * 20'000);
          const bool described = kind == Kind::data || kind == Kind::announce ||
                                 kind == Kind::reject || kind == Kind::ready;
          const size_t num_bytes =
              kind == Kind::data ? size_t(descriptor.num_bytes) : random.between(0, 9);
          peer.say(kind, 0, uint64_t(random.between(0, 3)), described ? &descriptor : nullptr,
                   Bytes(num_bytes));
        }
        Bytes packet = peer.take(number);
        if (random.chance(0.3)) packet[random.between(0, packet.size() - 1)] ^= std::byte{0x10};
        peer.link().handle_packet(packet);
        ++num_taken;
      }
    } catch (const std::runtime_error&) {
      ++num_refused;
    }
    std::map<Request*, int> num_outcomes;
    peer.link().lose();
    for (const auto& outcome : peer.link().take_outcomes()) ++num_outcomes[outcome.request.get()];
    for (const EntryPtr& entry : entries) CHECK_EQ(num_outcomes[entry->request.get()], 1);
    peer.link().take_departing();
    peer.link().drop();
    for (const EntryPtr& entry : entries) CHECK_EQ(entry->request.use_count(), 1);
  }
  CHECK(num_taken > num_cases / 10 && num_refused > num_cases / 10);
}
