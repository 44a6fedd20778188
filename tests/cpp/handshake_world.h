// A model of ranks that connect in pairs. The rules are those of Handshake. The rest is modelled: a
// network whose connections deliver words in order, and the few rules of TcpTransport about the end
// of a connection. A rank that is stopped, or slow, does not get its turn; every time limit may
// pass at any moment.
#pragma once

#include "check.h"
#include "transport/tcp/handshake.h"

namespace pipecomm::tcp {

// Maps all handshakes that behave the same from now on to one: only the order of attempt numbers
// counts.
class Normal {
 public:
  using Number = std::function<void(uint32_t&)>;
  // `attempts`: unfinished ones of the peer; `of_own` and `of_peer` are called with each number
  // that counts.
  static void forget(Handshake& it, const std::set<uint32_t>& attempts, bool& has_timer) {
    using State = Handshake::State;
    if (it.state_ != State::trying) it.next_address_ = it.num_refused_ = 0;
    if (it.state_ != State::attached) {
      it.id_ = {};
      it.has_spoken_ = false;
    }
    if (attempts.empty() || *attempts.begin() > it.newest_taken_) it.newest_taken_ = 0;
    has_timer &= it.state_ == State::resting ||
                 (it.state_ == State::trying && it.next_address_ < *it.num_addresses_);
    it.num_tries_ = 0;
  }
  static void show(Handshake& it, const Number& of_own, const Number& of_peer) {
    for (auto& each : it.tries_) of_own(each.number);
    of_own(it.id_.is_own ? it.id_.number : it.num_tries_);
    of_peer(it.newest_taken_);
    if (!it.id_.is_own) of_peer(it.id_.number);
  }
  static void count_on(Handshake& it, uint32_t last) { it.num_tries_ = last; }
  static void write(const Handshake& it, std::string& text) {
    const auto put = [&](auto... values) { (text.push_back(static_cast<char>(values)), ...); };
    put(it.state_, it.num_addresses_.has_value(), it.next_address_, it.num_refused_, it.num_tries_,
        it.newest_taken_, it.id_.is_own, it.id_.number, it.has_spoken_, it.tries_.size());
    for (const auto& each : it.tries_) put(each.number, each.stage);
  }
};

}  // namespace pipecomm::tcp

namespace handshake_model {

using tcp::AttemptId;
using tcp::Handshake;

// Each of these rules once was another one, which the model must find wrong.
struct Rules {
  bool has_confirmation = true;  // else hello and its answer connect the two
  bool tries_again = true;       // else a connection that ends before its answer is a refusal
  bool replaces_silent = true;   // else the first connection of a peer is the only one
  bool asks_the_store = true;    // else one look at its process decides whether a peer has died
};

struct Bounds {
  int num_ranks = 2;
  size_t num_addresses = 1;  // of each rank; the last one is right, no rank listens at the others
  int num_breaks = 0, num_kills = 0, num_closes = 0;
  size_t num_connections = 2;  // of a pair at a time
  bool has_patience = false;   // no time limit of an answer passes
  bool has_children = false;   // that outlive a killed rank, and hold its sockets
  Rules rules{};
  bool has_faults() const { return num_breaks + num_kills + num_closes > 0; }
};

enum class Said : uint8_t { hello, welcome, busy, ready, taken, gone, first, bye, end };
enum class At : uint8_t { connecting, open, welcomed, closed };

struct Connection {
  int guest, host;
  uint32_t number;
  bool is_right;
  bool is_cut = false;  // nothing of it reaches the host any more, not even its end
  At at_guest = At::connecting, at_host = At::connecting;
  std::vector<Said> to_guest{}, to_host{};
  auto operator<=>(const Connection&) const = default;
};

struct News {
  enum Kind : uint8_t { spoke, ended, end } kind;
  AttemptId id{};
};

// The state of a rank towards a peer.
struct End {
  Handshake handshake;
  bool is_introduced = false;
  bool has_timer = false;
  bool is_missed = false;               // the directory will look for a farewell
  std::optional<AttemptId> attached{};  // as the transport has it
  bool has_met = false;
  enum Fate : uint8_t { none, closed, died } fate = none;  // of the peer
  std::vector<News> news{};                                // on their way to the handshake
};

struct Rank {
  enum State : uint8_t { open, closing, gone } state = open;
  bool is_killed = false, has_said_farewell = false;
  bool has_ended =
      false;  // the process, as the others see it: some time after its sockets have closed
  bool has_child = false;
};

struct World {
  std::vector<Rank> ranks{};
  std::map<std::pair<int, int>, End> ends{};
  std::vector<Connection> connections{};
  int num_breaks = 0, num_kills = 0, num_closes = 0;  // so far
};

// Identifies a world: among a few million, two have the same number once in ten million runs.
uint64_t digest(const World& world) {
  std::string text;
  const auto put = [&](auto... values) { (text.push_back(static_cast<char>(values)), ...); };
  put(world.num_breaks, world.num_kills, world.num_closes);
  for (const Rank& each : world.ranks)
    put(each.state, each.is_killed, each.has_said_farewell, each.has_ended, each.has_child);
  for (const auto& [pair, e] : world.ends) {
    put(e.is_introduced, e.has_timer, e.is_missed, e.attached.has_value(), e.has_met, e.fate);
    if (e.attached) put(e.attached->is_own, e.attached->number);
    put(e.news.size());
    for (const News& each : e.news) put(each.kind, each.id.is_own, each.id.number);
    tcp::Normal::write(e.handshake, text);
  }
  for (const Connection& each : world.connections) {
    put(each.guest, each.host, each.number, each.is_right, each.is_cut, each.at_guest,
        each.at_host);
    for (const auto* said : {&each.to_guest, &each.to_host}) {
      put(said->size());
      for (const Said word : *said) put(word);
    }
  }
  return std::hash<std::string>()(text);
}

// Applies one event to a world.
class Turn {
 public:
  Turn(const Bounds& bounds, World& world) : bounds_(bounds), world_(world) {}
  std::string wrong;

  End& end(int rank, int peer) { return world_.ends.at({rank, peer}); }
  bool is_alive(int rank) const { return world_.ranks[rank].state != Rank::gone; }
  Connection* find(int rank, int peer, AttemptId id) {
    const int guest = id.is_own ? rank : peer;
    for (Connection& each : world_.connections)
      if (each.guest == guest && each.host == (id.is_own ? peer : rank) && each.number == id.number)
        return &each;
    return nullptr;
  }

  void carry_out(int rank, int peer) {
    End& e = end(rank, peer);
    while (const auto step = e.handshake.next_step()) {
      const AttemptId own{.is_own = true, .number = step->number};
      Connection* const connection = find(rank, peer, own);
      switch (step->deed) {
        case Handshake::Deed::dial:
          e.has_timer = true;
          world_.connections.push_back({.guest = rank,
                                        .host = peer,
                                        .number = step->number,
                                        .is_right = step->address + 1 == bounds_.num_addresses});
          break;
        case Handshake::Deed::say_hello:
          connection->to_host.push_back(Said::hello);
          break;
        case Handshake::Deed::say_ready:
          if (bounds_.rules.has_confirmation) connection->to_host.push_back(Said::ready);
          break;
        case Handshake::Deed::drop:
          close(rank, connection);
          break;
        case Handshake::Deed::hand_over:
          attach(rank, peer, own);
          break;
        case Handshake::Deed::rest:
          e.has_timer = true;
          if (rank < peer && bounds_.has_patience && !bounds_.has_faults())
            wrong = "the lower rank has to try again, though nothing has failed";
          break;
        case Handshake::Deed::miss:
          if (e.fate == End::none && !e.attached) e.is_missed = true;
          break;
      }
    }
  }

  void close(int rank, Connection* connection) {
    if (!connection) return;
    (connection->guest == rank ? connection->at_guest : connection->at_host) = At::closed;
    (connection->guest == rank ? connection->to_guest : connection->to_host).clear();
    (connection->guest == rank ? connection->to_host : connection->to_guest).push_back(Said::end);
  }

  void attach(int rank, int peer, AttemptId id) {
    End& e = end(rank, peer);
    Connection* const connection = find(rank, peer, id);
    if (e.fate != End::none || e.has_met) return close(rank, connection);
    if (e.attached) {
      if (e.attached->is_own) wrong = "a guest's connection is replaced";
      close(rank, find(rank, peer, *e.attached));
    }
    e.attached = id;
    if (id.is_own) connection->to_host.push_back(Said::first);
  }

  void lose(int rank, int peer, End::Fate fate) {
    End& e = end(rank, peer);
    if (std::exchange(e.fate, fate) != End::none) wrong = "a peer is lost twice";
    if (e.attached) close(rank, find(rank, peer, *e.attached));
    e.attached.reset();
    e.news.push_back({News::end});
    if (world_.ranks[rank].state == Rank::closing) return;  // has no effect any more
    const Rank& other = world_.ranks[peer];
    const bool has_closed = other.state != Rank::open && !other.is_killed;
    if (fate == End::closed && !other.has_said_farewell && !has_closed)
      wrong = other.is_killed ? "a death is taken for a close" : "a rank that is open has closed";
    if (fate == End::died && !other.is_killed && world_.num_breaks == 0)
      wrong =
          other.state == Rank::open ? "a peer that lives is lost" : "a close is taken for a death";
  }

  void hear_as_guest(Connection& connection, Said said) {
    const int rank = connection.guest, peer = connection.host;
    End& e = end(rank, peer);
    const AttemptId id{.is_own = true, .number = connection.number};
    if (e.attached == id) return hear(rank, peer, id, said);
    switch (said) {
      case Said::welcome:
        e.handshake.welcomed(connection.number);
        if (!bounds_.rules.has_confirmation) {
          carry_out(rank, peer);
          e.handshake.taken(id.number);
        }
        break;
      case Said::busy:
        e.handshake.failed(connection.number, false);
        break;
      case Said::taken:
        e.handshake.taken(connection.number);
        break;
      case Said::gone:
        e.handshake.turned_away();
        break;
      case Said::end:
        e.handshake.failed(connection.number, !bounds_.rules.tries_again);
        break;
      default:
        wrong = "a guest hears what only a host hears";
    }
    carry_out(rank, peer);
  }

  void hear_as_host(Connection& connection, Said said) {
    const int rank = connection.host, peer = connection.guest;
    End& e = end(rank, peer);
    const AttemptId id{.is_own = false, .number = connection.number};
    if (e.attached == id) return hear(rank, peer, id, said);
    if (said == Said::hello && !bounds_.rules.replaces_silent && e.attached)
      return close(rank, &connection);
    if (said == Said::hello && !bounds_.rules.has_confirmation) {
      if (rank < peer && is_trying(rank, peer)) {
        connection.to_guest.push_back(Said::busy);
        return close(rank, &connection);
      }
      if (!e.handshake.take(connection.number)) return close(rank, &connection);
      connection.to_guest.push_back(Said::welcome);
      attach(rank, peer, id);  // may add none to the connections
      carry_out(rank, peer);
    } else if (said == Said::hello && connection.at_host == At::open) {
      const auto answer = e.handshake.answer();
      if (answer == Handshake::Answer::gone) connection.to_guest.push_back(Said::gone);
      if (answer != Handshake::Answer::welcome) return close(rank, &connection);
      connection.to_guest.push_back(Said::welcome);
      connection.at_host = At::welcomed;
    } else if (said == Said::ready && connection.at_host == At::welcomed) {
      if (!e.handshake.take(connection.number)) return close(rank, &connection);
      connection.to_guest.push_back(Said::taken);
      attach(rank, peer, id);  // may add none to the connections
      carry_out(rank, peer);
    } else if (said == Said::end) {
      close(rank, &connection);
    } else {
      wrong = "a host hears what it cannot hear";
    }
  }

  // On the connection of the pair.
  void hear(int rank, int peer, AttemptId id, Said said) {
    End& e = end(rank, peer);
    if (said == Said::first) {
      e.has_met = true;
      if (id.is_own) return;
      e.news.push_back({News::spoke, id});
      find(rank, peer, id)->to_guest.push_back(Said::first);
    } else if (said == Said::bye) {
      lose(rank, peer, End::closed);
    } else if (said != Said::end) {
      wrong = "a rank greets on a connection that is taken";
    } else if (e.has_met || world_.ranks[rank].state == Rank::closing) {
      lose(rank, peer, End::died);
    } else if (!bounds_.rules.replaces_silent) {
      look_for(rank, peer);
    } else {
      close(rank, find(rank, peer, id));
      e.attached.reset();
      e.news.push_back({News::ended, id});
    }
  }

  // Looks up the fate of a missed peer.
  void look_for(int rank, int peer) {
    const Rank& other = world_.ranks[peer];
    const bool has_closed =
        bounds_.rules.asks_the_store ? other.has_said_farewell : !other.has_ended;
    lose(rank, peer, has_closed ? End::closed : End::died);
  }

  bool is_trying(int guest, int host) const {
    return std::any_of(world_.connections.begin(), world_.connections.end(), [&](const auto& c) {
      return c.guest == guest && c.host == host && c.at_guest != At::closed;
    });
  }

  void leave(int rank, bool is_killed) {
    world_.ranks[rank].has_child = is_killed && bounds_.has_children;
    world_.ranks[rank].has_ended = is_killed && bounds_.rules.asks_the_store;
    for (Connection& each : world_.connections) {
      if (each.guest != rank && each.host != rank) continue;
      const bool is_guest = each.guest == rank;
      if ((is_guest ? each.at_guest : each.at_host) == At::closed) continue;
      const int peer = is_guest ? each.host : each.guest;
      const End& e = end(rank, peer);
      const bool is_the_one = e.attached == AttemptId{.is_own = is_guest, .number = each.number};
      // A host sends nothing before the guest has spoken.
      if (!is_killed && is_the_one && (is_guest || e.has_met))
        (is_guest ? each.to_host : each.to_guest).push_back(Said::bye);
      if (!world_.ranks[rank].has_child) close(rank, &each);
    }
    world_.ranks[rank].state = Rank::gone;
    world_.ranks[rank].is_killed = is_killed;
    for (auto& [pair, e] : world_.ends)  // its state has no effect any more
      if (pair.first == rank) e = End{Handshake(rank < pair.second)};
  }

  // Drops state that no rank can observe any more.
  void tidy() {
    for (Connection& each : world_.connections) {
      if (!is_alive(each.guest) && each.at_host == At::closed) each.at_guest = At::closed;
      if (!is_alive(each.host) && each.at_guest == At::closed) each.at_host = At::closed;
      if (each.at_guest == At::closed || !is_alive(each.guest)) each.to_guest.clear();
      if (each.at_host == At::closed || each.is_cut || !is_alive(each.host)) each.to_host.clear();
    }
    std::erase_if(world_.connections, [&](const Connection& each) {
      return each.at_guest == At::closed &&
             (each.at_host == At::closed || each.at_host == At::connecting);
    });
    for (auto& [pair, e] : world_.ends) {
      std::set<uint32_t> attempts;
      for (const Connection& each : world_.connections)
        if (each.guest == pair.second && each.host == pair.first) attempts.insert(each.number);
      if (e.attached && !e.attached->is_own) attempts.erase(e.attached->number);
      tcp::Normal::forget(e.handshake, attempts, e.has_timer);
    }
    for (auto& [pair, e] : world_.ends) {
      const auto [guest, host] = pair;
      std::map<uint32_t, uint32_t> numbers{{0, 0}};
      show_numbers(guest, host, [&](uint32_t& number) { numbers[number]; });
      uint32_t next = 0;
      for (auto& [number, normal] : numbers) normal = next++;
      show_numbers(guest, host, [&](uint32_t& number) { number = numbers.at(number); });
      tcp::Normal::count_on(e.handshake, next - 1);
    }
    std::sort(world_.connections.begin(), world_.connections.end());
  }

  // All numbers of attempts of that guest with that host.
  void show_numbers(int guest, int host, const tcp::Normal::Number& show) {
    const auto nothing = [](uint32_t&) {};
    for (Connection& each : world_.connections)
      if (each.guest == guest && each.host == host) show(each.number);
    for (const bool is_own : {true, false}) {
      End& e = is_own ? end(guest, host) : end(host, guest);
      if (e.attached && e.attached->is_own == is_own) show(e.attached->number);
      for (News& each : e.news)
        if (each.id.is_own == is_own) show(each.id.number);
      tcp::Normal::show(e.handshake, is_own ? show : nothing, is_own ? nothing : show);
    }
  }

 private:
  const Bounds& bounds_;
  World& world_;
};

}  // namespace handshake_model
