// The TCP transport with threads as ranks, over real sockets of this host.
#include <netinet/in.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>

#include "host_exchanges.h"
#include "message/start_thread.h"

using namespace meeting;

TEST(random_programs) {
  for (int seed = 0; seed < check::rounds(40); ++seed) {
    check::context = "program " + std::to_string(seed);
    const Program program(seed, 5, 2, 1 << 20);
    Meeting meeting(program.size);
    meeting.over_tcp();
    run_ranks(meeting, [&](Communicator& comm) { play(program, comm); });
  }
}

TEST(large_messages_both_ways_between_all_pairs) {
  Meeting meeting(3);
  meeting.over_tcp();
  run_ranks(meeting, [](Communicator& comm) {
    for (int round = 0; round < 2; ++round) exchange_with_all(comm, 5 << 20, round, round % 2);
  });
}

// Ranks 0 and 3 of eight are no neighbours: both ends find out at once that they need each other.
// The watchdog may find room in a socket before anybody else does, also for the last bytes. Nothing
// that comes from the peer afterwards tells of them.
TEST(ticks_beside_large_messages) {
  constexpr int kNumRanks = 5;
  Meeting meeting(kNumRanks);
  meeting.over_tcp();
  std::barrier<> rounds(kNumRanks);
  const auto take_part = [&](int rank) {
    HostTransport* transport = nullptr;
    const auto comm = std::make_unique<Communicator>(
        CommunicatorOptions{.rank = rank, .size = kNumRanks, .timeout = kLimit},
        [&](TransportEvents& events) {
          auto made = meeting.transport(rank, events);
          transport = made.get();
          return made;
        });
    std::atomic<bool> is_over{false};
    std::thread ticks([&] {
      while (!is_over) transport->tick();
    });
    Bytes bytes = coded_bytes(1, 16 << 20);
    std::vector<PointToPoint> batch;
    for (int peer = 0; peer < kNumRanks; ++peer)
      if (peer != rank && (peer == 0 || rank == 0))
        batch.push_back({rank == 0 ? Direction::send : Direction::recv, peer, 0, tensor(bytes), 0});
    for (int round = 0; round < 12; ++round) {
      const FailurePtr failure =
          failure_of(*comm, [&] { return comm->batch_p2p(batch, {.is_async = round % 2 == 0}); });
      if (failure) check::fail(__FILE__, __LINE__, failure->message);
      rounds.arrive_and_wait();
    }
    is_over = true;
    ticks.join();
    comm->close(nullptr);
  };
  check::in_threads(kNumRanks, take_part);
}

TEST(both_ends_connect_at_once) {
  for (int round = 0; round < 20; ++round) {
    check::context = "both at once, round " + std::to_string(round);
    Meeting meeting(8);
    meeting.over_tcp();
    std::atomic<int> num_ready{0};
    run_ranks(meeting, [&](Communicator& comm) {
      ++num_ready;
      while (num_ready < 8) std::this_thread::yield();
      if (comm.rank() != 0 && comm.rank() != 3) return;
      Bytes mine = coded_bytes(uint64_t(comm.rank()), 40'000), other(40'000);
      const int peer = 3 - comm.rank();
      const PointToPoint batch[] = {{Direction::send, peer, 0, tensor(mine), 0},
                                    {Direction::recv, peer, 0, tensor(other), 0}};
      wait(comm, comm.batch_p2p(batch));
      CHECK(other == coded_bytes(uint64_t(peer), 40'000));
    });
  }
}

// Rank 0 of eight is a neighbour of all but ranks 3 and 5.
TEST(connections_ahead_of_messages) {
  Meeting meeting(8);
  meeting.over_tcp();
  std::atomic<int> num_waiting{7};
  run_ranks(meeting, [&](Communicator& comm) {
    if (comm.rank() == 0) {
      const int peers[] = {0, 1, 3, 5};
      comm.connect(peers);
      const auto until = std::chrono::steady_clock::now() + kLimit;
      for (int peer = 1; peer < 8; ++peer) {
        while (comm.describe_peer(peer) != "is connected" &&
               std::chrono::steady_clock::now() < until)
          std::this_thread::sleep_for(1ms);
        CHECK_EQ(comm.describe_peer(peer), "is connected");
      }
      num_waiting = 0;
    }
    while (num_waiting > 0) std::this_thread::yield();
  });
}

size_t num_entries(const char* folder) {
  size_t count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(folder)) ++count;
  return count;
}

TEST(threads_do_not_grow_with_the_group) {
  for (const int size : {2, 9}) {
    const size_t before = num_entries("/proc/self/task");
    Meeting meeting(size);
    meeting.over_tcp();
    std::vector<std::unique_ptr<Communicator>> comms;
    for (int rank = 0; rank < size; ++rank) comms.push_back(meeting.communicator(rank));
    std::vector<OperationPtr> barriers;
    for (const auto& comm : comms) barriers.push_back(comm->barrier());
    for (int rank = 0; rank < size; ++rank) wait(*comms[rank], barriers[rank]);
    CHECK_EQ(num_entries("/proc/self/task") - before, size_t(4 * size));
    check::in_threads(size, [&](int rank) { comms[rank]->close(nullptr); });
  }
}

// An address of another network, and one where a stranger listens, come before the right one.
TEST(addresses_that_lead_elsewhere) {
  Meeting meeting(2);
  meeting.over_tcp();
  for (Introduction& introduction : meeting.introductions)
    introduction.hosts = {"192.0.2.1", "no address", "127.0.0.1"};
  run_ranks(meeting, [&](Communicator& comm) { wait(comm, comm.barrier()); });
}

// A process that holds what this one has open at the time, as a worker of a DataLoader does.
class Child {
 public:
  explicit Child(const std::function<void()>& body = nullptr) : pid_(fork()) {
    if (pid_ == 0) {
      if (body) body();
      pause();
      _exit(0);
    }
  }
  ~Child() { end(); }
  pid_t pid() const { return pid_; }
  void end() {
    if (pid_ <= 0) return;
    kill(pid_, SIGKILL);
    waitpid(std::exchange(pid_, 0), nullptr, 0);
  }

 private:
  pid_t pid_;
};

sockaddr_in loopback(uint16_t port, uint8_t last_digit = 1) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK - 1 + last_digit);
  return address;
}

// One end of a connection to a rank, which says what it likes.
class Stranger {
 public:
  explicit Stranger(uint16_t port) : fd_(::socket(AF_INET, SOCK_STREAM, 0)) {
    const sockaddr_in address = loopback(port);
    CHECK_EQ(connect(fd_, reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
    limit_waiting();
  }
  explicit Stranger(const tcp::Socket& listener) : fd_(accept_soon(listener)) {
    CHECK(fd_ >= 0);
    limit_waiting();
  }
  ~Stranger() { ::close(fd_); }
  void say(const void* data, size_t num_bytes) {
    CHECK_EQ(send(fd_, data, num_bytes, MSG_NOSIGNAL), static_cast<ssize_t>(num_bytes));
  }
  // As rank `from` of `meeting` would.
  void say(const Meeting& meeting, tcp::Word word, int from, int to, uint32_t attempt = 1) {
    if (word == tcp::Word::hello) nonces.guest[0] = std::byte{7};
    said = tcp::make_greeting(word, from, to, attempt, nonces, meeting.key);
    say(&said, sizeof said);
  }
  bool hears(tcp::Word word) {
    if (recv(fd_, &heard, sizeof heard, MSG_WAITALL) != sizeof heard) return false;
    const bool is_guest = heard.word == tcp::Word::hello || heard.word == tcp::Word::ready;
    (is_guest ? nonces.guest : nonces.listener) = heard.nonce;
    return heard.word == word;
  }
  // Whether the rank has it for its connection to the peer.
  bool is_taken(const Meeting& meeting, int from, int to, uint32_t attempt = 1) {
    say(meeting, tcp::Word::hello, from, to, attempt);
    if (!hears(tcp::Word::welcome)) return false;
    say(meeting, tcp::Word::ready, from, to, attempt);
    return hears(tcp::Word::taken);
  }
  bool hears_packet(Bytes& packet) {
    return recv(fd_, packet.data(), packet.size(), MSG_WAITALL) == std::ssize(packet);
  }
  void greet() {
    const Bytes packet = wire::PacketWriter().take(kEpoch, 1);
    say(packet.data(), packet.size());
  }
  bool hears_the_end() {
    std::byte byte;
    return recv(fd_, &byte, 1, 0) <= 0;
  }

  tcp::Nonces nonces;
  tcp::Greeting said, heard;

 private:
  static int accept_soon(const tcp::Socket& listener) {
    pollfd caller{listener.fd(), POLLIN, 0};
    (void)poll(&caller, 1, 20'000);
    return ::accept(listener.fd(), nullptr, nullptr);
  }
  void limit_waiting() {
    const timeval limit{.tv_sec = 20, .tv_usec = 0};
    setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
  }
  const int fd_;
};

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

// Nothing is taken from one that cannot prove that it belongs, though it has heard all that was said.
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

// Ranks of which one has another key both say so.
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

// Rank 1 comes late, or is stopped: the system takes connections for it, and rank 0 gives each up after a
// while. What rank 1 finds first are those that rank 0 has given up.
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

// The other end says that it is through with this rank, or nobody listens: one look at the store decides.
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

// Words with wrong bytes, from either end: nothing comes of them.
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

// Whatever connects, a reserve of descriptors is left, and the peer gets through.
TEST(strangers_leave_descriptors) {
  rlimit before{};
  CHECK_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  for (const int num_free : {70, 400}) {
    Meeting meeting(2);
    meeting.over_tcp();
    const rlimit scarce{.rlim_cur = num_entries("/proc/self/fd") + num_free,
                        .rlim_max = before.rlim_max};
    CHECK_EQ(setrlimit(RLIMIT_NOFILE, &scarce), 0);
    const auto first = meeting.communicator(0, 20s);
    const sockaddr_in address = loopback(meeting.introductions[0].port);
    const auto connect_often = [&] {
      for (int number = 0; number < 200; ++number) {
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

// A rank that has closed answers all messages, and the peer does not read: at some time that is enough.
TEST(a_peer_that_does_not_read) {
  int fds[2];
  CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, fds), 0);
  const tcp::Socket peer(fds[0]);
  tcp::Connection connection(1, 0, kEpoch, 1 << 20);
  connection.attach(tcp::Socket(fds[1]), false);
  connection.link().say_closing();
  const auto flood = [&] {
    for (uint64_t number = 1; number < 1000; ++number) {
      wire::PacketWriter writer;
      Descriptor descriptor;
      for (uint64_t seq = 200 * (number - 1); seq < 200 * number; ++seq)
        writer.add(wire::Kind::data, 0, seq, &descriptor, {});
      const Bytes packet = writer.take(kEpoch, number);
      size_t num_sent = 0;
      while (num_sent < packet.size()) {
        const ssize_t count =
            send(peer.fd(), packet.data() + num_sent, packet.size() - num_sent, MSG_NOSIGNAL);
        if (count > 0) num_sent += size_t(count);
        connection.read();
        connection.write();
      }
    }
  };
  CHECK_THROWS(std::runtime_error, "rank 0 sends, but does not read what is said to it", flood());
}

// Three addresses where something takes connections, and says nothing, come before the right one.
TEST(addresses_are_tried_side_by_side) {
  Meeting meeting(2);
  meeting.over_tcp();
  std::vector<tcp::Socket> silent;
  for (int rank : {0, 1}) {
    Introduction& introduction = meeting.introductions[rank];
    meeting.listeners[rank] = tcp::listen_at({"127.0.0.1"}, introduction.port);
    for (const int last_digit : {2, 3, 4}) {
      tcp::Socket& socket = silent.emplace_back(::socket(AF_INET, SOCK_STREAM, 0));
      const sockaddr_in address = loopback(introduction.port, uint8_t(last_digit));
      CHECK_EQ(bind(socket.fd(), reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
      CHECK_EQ(listen(socket.fd(), 16), 0);
    }
    introduction.hosts = {"127.0.0.2", "127.0.0.3", "127.0.0.4", "127.0.0.1"};
  }
  const auto begin = Clock::now();
  run_ranks(meeting, [&](Communicator& comm) { wait(comm, comm.barrier()); });
  CHECK(Clock::now() - begin < 5s);
}

TEST(listening_at_chosen_addresses) {
  uint16_t port = 0;
  const auto listeners = tcp::listen_at({"127.0.0.2", "127.0.0.3"}, port);
  CHECK_EQ(listeners.size(), 2u);
  for (const int last_digit : {1, 2, 3}) {
    const tcp::Socket socket(::socket(AF_INET, SOCK_STREAM, 0));
    const sockaddr_in address = loopback(port, uint8_t(last_digit));
    const int result =
        connect(socket.fd(), reinterpret_cast<const sockaddr*>(&address), sizeof address);
    CHECK_EQ(result, last_digit == 1 ? -1 : 0);
  }
}

// A peer that knows the secret, and then breaks the protocol or off.
TEST(a_peer_that_breaks) {
  const auto expect = [](const std::string& what, const std::function<void(Stranger&)>& act,
                         FailureKind kind, const std::string& text) {
    check::context = what;
    Meeting meeting(2);
    meeting.over_tcp();
    const uint16_t port = meeting.introductions[1].port;
    const auto comm = meeting.communicator(1);
    Bytes memory(100'000);
    const PointToPoint recv{Direction::recv, 0, 0, tensor(memory), 0};
    const OperationPtr operation = comm->batch_p2p({&recv, 1});
    auto peer = std::make_unique<Stranger>(port);
    CHECK(peer->is_taken(meeting, 0, 1));
    peer->greet();
    act(*peer);
    if (kind == FailureKind::peer_lost) peer.reset();
    const FailurePtr failure = failure_of(*comm, [&] { return operation; });
    says(failure, kind, text);
    comm->close(nullptr);
  };
  expect("breaks off", [](Stranger&) {}, FailureKind::peer_lost, "lost the connection to rank 0");
  expect(
      "breaks off in a header", [](Stranger& peer) { peer.say("PCX1", 4); }, FailureKind::peer_lost,
      "lost the connection to rank 0");
  expect(
      "nonsense", [](Stranger& peer) { peer.say(Bytes(64).data(), 64); }, FailureKind::error,
      "wrong magic number");
  expect(
      "a body that nobody has called for",
      [](Stranger& peer) {
        const wire::PieceHeader header{.channel = 0, .epoch = kEpoch, .num_bytes = 10, .seq = 0};
        peer.say(&header, sizeof header);
      },
      FailureKind::error, "sends a body that is not expected");
  expect(
      "a packet of another communicator",
      [](Stranger& peer) {
        wire::PacketWriter writer;
        writer.add(wire::Kind::closing, 0, 0, nullptr, {});
        const Bytes packet = writer.take(kEpoch + 1, 2);
        peer.say(packet.data(), packet.size());
      },
      FailureKind::error, "belongs to another communicator");
}

// In the middle of a body, and while messages wait for their turn.
TEST(aborts_reach_all_ranks) {
  Meeting meeting(4);
  meeting.over_tcp();
  std::atomic<int> num_ready{0};
  check::in_threads(4, [&](int rank) {
    const auto comm = meeting.communicator(rank);
    wait(*comm, comm->barrier());
    ++num_ready;
    while (num_ready < 4) std::this_thread::yield();
    Bytes mine(64 << 20), other(8);
    const int next = (rank + 1) % 4, previous = (rank + 3) % 4;
    const PointToPoint batch[] = {{Direction::send, next, 0, tensor(mine), 0},
                                  {Direction::recv, previous, 1, tensor(other), 0}};
    const FailurePtr failure = failure_of(*comm, [&] {
      const auto operation = comm->batch_p2p({batch, size_t{rank == 2 ? 1u : 2u}});
      if (rank == 2) comm->abort("enough");
      return operation;
    });
    says(failure, FailureKind::aborted, "enough");
    comm->close(nullptr);
  });
}

// Rank 1 knows where rank 0 listened, and comes when that one has closed; its child holds the port.
TEST(a_closed_peer_whose_child_lives) {
  Meeting meeting(2);
  meeting.over_tcp();
  const Child child;
  std::atomic<bool> looks{false}, closed{false};
  meeting.look_up = [&](int rank, int peer) -> std::optional<Introduction> {
    if (rank == 0) return std::nullopt;
    looks = true;
    while (!closed) std::this_thread::sleep_for(1ms);
    return meeting.introductions[peer];
  };
  const auto comm = meeting.communicator(1, 10s);
  while (!looks) std::this_thread::sleep_for(1ms);
  meeting.communicator(0)->close(nullptr);
  closed = true;
  Bytes memory(8);
  const PointToPoint recv{Direction::recv, 0, 0, tensor(memory), 0};
  const FailurePtr failure = failure_of(*comm, [&] { return comm->batch_p2p({&recv, 1}); });
  CHECK(failure && failure->kind == FailureKind::peer_lost);
  CHECK(failure && failure->message.find("has closed its communicator") != std::string::npos);
  CHECK(comm->failure() == nullptr);
  comm->close(nullptr);
}

// A rank aborts, and its process ends, while all threads of its peer that could hear of it are busy.
TEST(a_process_that_ends_after_an_abort) {
  Child process;
  Meeting meeting(2);
  meeting.over_tcp();
  meeting.introductions[1].pid = process.pid();
  const auto first = meeting.communicator(0), second = meeting.communicator(1);
  const OperationPtr barriers[] = {first->barrier(), second->barrier()};
  wait(*first, barriers[0]);
  wait(*second, barriers[1]);
  Bytes mine(8), other(8);
  const PointToPoint send{Direction::send, 0, 0, tensor(mine), 0};
  const PointToPoint recv{Direction::recv, 1, 0, tensor(other), 0};
  std::atomic<bool> is_busy{false};
  const auto keep_busy = [&is_busy, comm = first.get()] {
    is_busy = true;
    const auto until = std::chrono::steady_clock::now() + 20s;
    while (!comm->failure() && std::chrono::steady_clock::now() < until)
      std::this_thread::sleep_for(1ms);
  };
  const OperationPtr received = first->batch_p2p({&recv, 1}, {.on_success = keep_busy});
  wait(*second, second->batch_p2p({&send, 1}));
  while (!is_busy) std::this_thread::sleep_for(1ms);
  second->abort("enough");
  process.end();
  // A thread that waited for it would serve the connection.
  while (!first->failure() && !received->done()) std::this_thread::sleep_for(1ms);
  CHECK(first->failure() != nullptr);
  if (!first->failure()) return;
  CHECK(first->failure()->kind == FailureKind::aborted);
  CHECK_EQ(first->failure()->message,
           "communicator failed on rank 1: communicator aborted by rank 1: enough");
  for (const auto& comm : {first.get(), second.get()}) comm->close(nullptr);
}

// Rank 3 has no connection to rank 0 when that one closes.
TEST(a_peer_that_closed_before_they_met) {
  Meeting meeting(8);
  meeting.over_tcp();
  std::atomic<bool> closed{false};
  std::atomic<int> num_waiting{7};
  run_ranks(meeting, [&](Communicator& comm) {
    if (comm.rank() == 0) {
      comm.close(nullptr);
      closed = true;
      return;
    }
    while (!closed) std::this_thread::yield();
    if (comm.rank() == 3) {
      Bytes memory(8);
      const PointToPoint recv{Direction::recv, 0, 0, tensor(memory), 0};
      const FailurePtr failure = failure_of(comm, [&] { return comm.batch_p2p({&recv, 1}); });
      says(failure, FailureKind::peer_lost, "has closed its communicator");
      CHECK(comm.failure() == nullptr);
    }
    --num_waiting;
    while (num_waiting > 0) std::this_thread::yield();
  });
}

// Somebody takes the connection and says nothing: the error says so at the deadline.
TEST(a_peer_that_cannot_be_reached) {
  Meeting meeting(2);
  meeting.over_tcp();
  const auto comm = meeting.communicator(0, 500ms);
  Bytes memory(8);
  const PointToPoint send{Direction::send, 1, 0, tensor(memory), 0};
  const FailurePtr failure = failure_of(*comm, [&] { return comm->batch_p2p({&send, 1}); });
  says(failure, FailureKind::timeout, "rank 1 is not connected");
  comm->close(nullptr);
}

#ifdef PIPECOMM_FAULTS
TEST(no_thread_is_left) {
  for (const int failing : {1, 2, 3, 4}) {
    check::context = "no thread " + std::to_string(failing);
    Meeting meeting(2);
    meeting.over_tcp();
    failing_thread = failing;
    CHECK_THROWS(PipeCommException, "cannot start a thread", meeting.communicator(0));
    failing_thread = 0;
  }
}
#endif

TEST(interfaces) {
  for (const std::string& host : tcp::local_hosts("")) CHECK(!host.starts_with("127."));
  const std::vector<std::string> loopback = tcp::local_hosts("lo");
  CHECK(std::find(loopback.begin(), loopback.end(), "127.0.0.1") != loopback.end());
  CHECK_INVALID("the network interface nosuch0 does not exist here",
                tcp::local_hosts("lo,nosuch0"));
}
