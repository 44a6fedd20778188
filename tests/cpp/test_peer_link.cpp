// The rules of PeerLink, one by one: its window, the control channel, large bodies, and peers that break
// the protocol.
#include "link_pair.h"

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

// A receiver that closes refuses a full window of messages, and those that its sender then lets follow.
TEST(a_full_window_that_is_refused) {
  Random random(4);
  Pair pair;
  std::vector<EntryPtr> sends;
  for (int idx = 0; idx < 500; ++idx)
    sends.push_back(pair.post(0, Direction::send, make_descriptor(0, kMaxInlineBytes)));
  pair.run_to_quiet(random);
  pair.link(1).say_closing();
  pair.run_to_quiet(random);
  for (const EntryPtr& send : sends)
    CHECK(send->num_outcomes == 1 && send->failure &&
          check::contains(send->failure->message, kClosedText));
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
