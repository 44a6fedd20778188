// The greetings of the two ends of a new TCP connection, and of strangers.
#include <sys/resource.h>

#include "stranger.h"

using namespace meeting;

TEST(strangers_are_sent_away) {
  using tcp::Word;
  Meeting meeting(2), other(2);
  meeting.over_tcp();
  other.key[3] ^= std::byte{1};
  Stranger before(meeting.introductions[1].port);
  before.say(meeting, Word::hello, 0, 1);
  run_ranks(meeting, [&](Communicator& comm) {
    const int rank = comm.rank(), peer = 1 - rank;
    const uint16_t port = meeting.introductions[rank].port;
    wait(comm, comm.barrier());
    Stranger silent(port), half(port);
    half.say("PCH2", 4);
    Stranger noisy(port), wrong_rank(port), out_of_range(port), twice(port), wrong_word(port);
    noisy.say(Bytes(200).data(), 200);
    CHECK(!noisy.hears(Word::welcome));
    CHECK(!wrong_rank.is_taken(meeting, peer, peer));
    CHECK(!out_of_range.is_taken(meeting, 2, rank));
    CHECK(!twice.is_taken(meeting, peer, rank, 99));  // that rank is connected
    wrong_word.say(meeting, Word::ready, peer, rank);
    CHECK(!wrong_word.hears(Word::taken));
    wait(comm, comm.barrier());
  });
}

// A peer without a proof is not accepted, even if it has seen all greetings.
TEST(proofs) {
  using tcp::Word;
  Meeting meeting(2), other(2);
  meeting.over_tcp();
  other.key[3] ^= std::byte{1};
  const uint16_t port = meeting.introductions[1].port;
  meeting.look_up = [](int, int) { return std::nullopt; };
  const auto comm = meeting.communicator(1);
  Stranger honest(port), without_key(port), reflects(port), replays(port), renames(port);
  CHECK(!without_key.is_taken(other, 0, 1));
  CHECK(without_key.heard.word == Word::welcome);
  CHECK(tcp::is_proven(without_key.heard, without_key.nonces, meeting.key));
  CHECK(!tcp::is_proven(without_key.heard, without_key.nonces, other.key));
  CHECK(!tcp::is_proven(without_key.heard, honest.nonces, meeting.key));  // of another connection
  reflects.say(meeting, Word::hello, 0, 1);
  CHECK(reflects.hears(Word::welcome));
  tcp::Greeting back = reflects.heard;
  back.word = Word::ready;
  std::swap(back.from, back.to);
  reflects.say(&back, sizeof back);
  CHECK(!reflects.hears(Word::taken));
  renames.say(meeting, Word::hello, 0, 1, 1);
  CHECK(renames.hears(Word::welcome));
  renames.say(meeting, Word::ready, 0, 1, 2);
  CHECK(!renames.hears(Word::taken));
  CHECK(honest.is_taken(meeting, 0, 1, 3));
  replays.say(meeting, Word::hello, 0, 1, 3);
  CHECK(replays.hears(Word::welcome));
  replays.say(&honest.said, sizeof honest.said);
  CHECK(!replays.hears(Word::taken));
  comm->abort("enough");
}

// If one of two ranks has another key, both report it.
TEST(ranks_with_different_secrets) {
  Meeting meeting(2), other(2);
  meeting.over_tcp();
  other.key[3] ^= std::byte{1};
  other.introductions = meeting.introductions;
  other.listeners = std::move(meeting.listeners);
  meeting.listeners.resize(2);
  meeting.listeners[0] = std::move(other.listeners[0]);
  check::in_threads(2, [&](int rank) {
    const auto comm = (rank == 0 ? meeting : other).communicator(rank, 20s);
    says(failure_of(*comm, [&] { return comm->barrier(); }), FailureKind::peer_lost,
         "does not prove that it belongs; is PIPECOMM_SECRET equal on all ranks?");
    std::this_thread::sleep_for(100ms);  // the other one has seen it as well
    comm->close(nullptr);
  });
}

// Rank 1 comes late, or is stopped: the system accepts connections for it, and rank 0 abandons each
// after a while. Rank 1 first finds the abandoned ones.
TEST(a_rank_that_is_slow_while_others_connect) {
  Meeting meeting(2);
  meeting.over_tcp();
  meeting.limits.greeting = 100ms;
  check::in_threads(2, [&](int rank) {
    if (rank == 1) std::this_thread::sleep_for(700ms);
    const auto comm = meeting.communicator(rank, 20s);
    try {
      wait(*comm, comm->barrier());
    } catch (const PipeCommException& error) {
      check::fail(__FILE__, __LINE__, error.what());
    }
    comm->close(nullptr);
  });
}

// Only the newest attempt of a peer counts, until the peer has spoken.
TEST(newer_attempts) {
  Meeting meeting(2);
  meeting.over_tcp();
  meeting.look_up = [](int, int) { return std::nullopt; };
  const uint16_t port = meeting.introductions[1].port;
  const auto comm = meeting.communicator(1, 10s);
  Stranger first(port), second(port), older(port), third(port);
  CHECK(first.is_taken(meeting, 0, 1, 1));
  CHECK(second.is_taken(meeting, 0, 1, 3));
  CHECK(first.hears_the_end());
  CHECK(!older.is_taken(meeting, 0, 1, 2));
  second.greet();
  const Bytes packet = wire::PacketWriter().take(kEpoch, 1);
  Bytes answer(packet.size());
  CHECK(second.hears_packet(answer));
  CHECK(answer == packet);
  CHECK(!third.is_taken(meeting, 0, 1, 4));
  comm->close(nullptr);
}

// A middlebox breaks the connection at each step of the greeting; rank 0 tries again.
TEST(connections_that_break_while_they_are_made) {
  using tcp::Word;
  Meeting meeting(2);
  meeting.over_tcp();
  meeting.limits.rest = 1ms;
  const tcp::Socket listener = std::move(meeting.listeners[1][0]);
  const auto comm = meeting.communicator(0, 20s);
  {
    const Stranger at_once(listener);
  }
  for (const bool after_welcome : {false, true}) {
    Stranger host(listener);
    CHECK(host.hears(Word::hello));
    CHECK_EQ(host.heard.attempt, after_welcome ? 3u : 2u);
    if (!after_welcome) continue;
    host.say(meeting, Word::welcome, 1, 0, host.heard.attempt);
    CHECK(host.hears(Word::ready));
    CHECK(tcp::is_proven(host.heard, host.nonces, meeting.key));
  }
  Stranger host(listener);
  CHECK(host.hears(Word::hello));
  host.say(meeting, Word::welcome, 1, 0, 4);
  CHECK(host.hears(Word::ready));
  host.say(meeting, Word::taken, 1, 0, 4);
  Bytes packet(24);
  CHECK(host.hears_packet(packet));
  host.greet();
  CHECK_EQ(comm->describe_peer(1), "is connected");
  comm->close(nullptr);
}

// The other end answers `gone`, or no process listens: one look-up in the store decides.
TEST(peers_that_are_missed) {
  using tcp::Word;
  for (const bool is_gone : {false, true}) {
    Meeting meeting(2);
    meeting.over_tcp();
    const tcp::Socket listener = std::move(meeting.listeners[1][0]);
    const uint16_t port = meeting.introductions[1].port;
    if (!is_gone) shutdown(listener.fd(), SHUT_RD);
    const auto comm = meeting.communicator(0, 20s);
    std::optional<Stranger> host;
    if (is_gone) {
      host.emplace(listener);
      CHECK(host->hears(Word::hello));
      host->say(meeting, Word::gone, 1, 0);
    }
    const FailurePtr failure = failure_of(*comm, [&] { return comm->barrier(); });
    says(failure, FailureKind::peer_lost,
         is_gone
             ? "it has given up the connection to this rank"
             : "nobody listens at 127.0.0.1:" + std::to_string(port) + ": its process has ended");
    if (!is_gone) CHECK(failure && check::contains(failure->message, "GLOO_SOCKET_IFNAME"));
    comm->close(nullptr);
  }
}

// Operations that are posted while the communicator fails: each one names the cause.
TEST(calls_that_meet_the_loss_of_a_peer) {
  using tcp::Word;
  for (int round = 0; round < check::rounds(100); ++round) {
    Meeting meeting(2);
    meeting.over_tcp();
    const tcp::Socket listener = std::move(meeting.listeners[1][0]);
    const auto comm = meeting.communicator(0, 20s);
    Stranger host(listener);
    CHECK(host.hears(Word::hello));
    host.say(meeting, Word::gone, 1, 0);
    std::vector<OperationPtr> posted;
    FailurePtr failure;
    while (!failure && posted.size() < 100'000) {
      try {
        posted.push_back(comm->barrier(true));
      } catch (const PipeCommException& error) {
        failure = error.failure();
      }
    }
    constexpr char kCause[] = "it has given up the connection to this rank";
    says(failure, FailureKind::peer_lost, kCause);
    for (const OperationPtr& operation : posted)
      says(failure_of(*comm, [&] { return operation; }), FailureKind::peer_lost, kCause);
    comm->close(nullptr);
  }
}

// Words with wrong bytes, from either end, have no effect.
TEST(fuzzed_greetings) {
  using tcp::Word;
  std::mt19937_64 random(5);
  Meeting meeting(2);
  meeting.over_tcp();
  meeting.limits.rest = 1ms;
  meeting.introductions[1].hosts.push_back("no address");  // so that rank 1 is never missed
  const tcp::Socket listener = std::move(meeting.listeners[1][0]);
  const auto comm = meeting.communicator(0, 20s);
  const uint16_t port = meeting.introductions[0].port;
  const auto say_wrongly = [&](Stranger& stranger, Word word, int from, int to, uint32_t attempt) {
    tcp::Greeting greeting =
        tcp::make_greeting(word, from, to, attempt, stranger.nonces, meeting.key);
    const size_t place = random() % 56;  // the nonce is no part of what is proven here
    const auto bytes = reinterpret_cast<std::byte*>(&greeting);
    bytes[place < 24 ? place : place + 16] ^= static_cast<std::byte>(1 + random() % 255);
    stranger.say(bytes, random() % 4 == 0 ? random() % sizeof greeting : sizeof greeting);
  };
  for (int round = 0; round < check::rounds(200); ++round) {
    Stranger guest(port), host(listener);
    guest.say(meeting, Word::hello, 1, 0, 1);
    CHECK(guest.hears(Word::welcome));
    CHECK(host.hears(Word::hello));
    if (round % 2 == 0) {
      say_wrongly(host, Word::welcome, 1, 0, host.heard.attempt);
    } else {
      host.say(meeting, Word::welcome, 1, 0, host.heard.attempt);
      CHECK(host.hears(Word::ready));
      say_wrongly(host, Word::taken, 1, 0, host.heard.attempt);
    }
    say_wrongly(guest, Word::ready, 1, 0, 1);
    if (comm->failure() || comm->describe_peer(1) == "is connected") break;
  }
  CHECK(comm->describe_peer(1) != "is connected");
  comm->close(nullptr);
}

// However many strangers connect, a reserve of file descriptors is left, and the peer connects.
TEST(strangers_leave_descriptors) {
  rlimit before{};
  CHECK_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  struct Case {
    rlim_t num_free;
    int num_strangers;
  };
  for (const auto& [num_free, num_strangers] : {Case{70, 200}, {400, 200}, {1000, 1100}}) {
    Meeting meeting(2);
    meeting.over_tcp();
    const rlimit scarce{.rlim_cur = num_entries("/proc/self/fd") + num_free,
                        .rlim_max = before.rlim_max};
    CHECK_EQ(setrlimit(RLIMIT_NOFILE, &scarce), 0);
    const auto first = meeting.communicator(0, 20s);
    const sockaddr_in address = loopback(meeting.introductions[0].port);
    const auto connect_often = [&, num = num_strangers] {
      const rlimit most{.rlim_cur = before.rlim_max, .rlim_max = before.rlim_max};
      setrlimit(RLIMIT_NOFILE, &most);
      for (int number = 0; number < num; ++number) {
        const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
        (void)!::connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address);
      }
    };
    setrlimit(RLIMIT_NOFILE, &before);
    const Child strangers(connect_often);
    std::this_thread::sleep_for(200ms);
    CHECK(num_entries("/proc/self/fd") < scarce.rlim_cur - 20);
    CHECK(num_entries("/proc/self/fd") < scarce.rlim_cur - num_free + 64 + 20);
    const auto second = meeting.communicator(1, 20s);
    const OperationPtr barriers[] = {first->barrier(), second->barrier()};
    wait(*first, barriers[0]);
    wait(*second, barriers[1]);
    check::in_threads(2, [&](int rank) { (rank == 0 ? first : second)->close(nullptr); });
  }
}

// More peers connect at once than are kept as guests: they wait for each other, and each connects.
TEST(more_peers_than_guests) {
  using tcp::Word;
  constexpr int kSize = 120;
  Meeting meeting(kSize);
  meeting.over_tcp();
  meeting.limits.silent_guest = meeting.limits.guest = 20s;
  meeting.look_up = [](int, int) { return std::nullopt; };
  std::list<Stranger> peers;
  for (int rank = 1; rank < kSize; ++rank) {
    peers.emplace_back(meeting.introductions[0].port);
    peers.back().say(meeting, Word::hello, rank, 0);
  }
  const auto comm = meeting.communicator(0, 20s);
  for (int rank = 1; Stranger& peer : peers) {
    CHECK(peer.hears(Word::welcome));
    peer.say(meeting, Word::ready, rank++, 0);
    CHECK(peer.hears(Word::taken));
  }
  comm->abort("enough");
}
