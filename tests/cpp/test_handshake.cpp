// How two ranks come to one connection: everything that may happen to them, in any order, within bounds.
//
// The rules are those of Handshake. Around them is a model of what carries them out: a network whose
// connections bring what was said in order, and the few rules of TcpTransport about the end of a
// connection. A rank that is stopped, or slow, is one that does not come to its turn; every time limit
// may pass at any moment.
#include <unordered_map>

#include "check.h"
#include "transport/tcp/handshake.h"
#include "transport/tcp/sha256.h"

namespace pipecomm::tcp {

// Makes one of all handshakes that do the same from now on: numbers of attempts only count by their order.
class Normal {
 public:
  using Number = std::function<void(uint32_t&)>;
  // `attempts`: of the peer that are under way; `of_own` and `of_peer` are shown each number that counts.
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

namespace {

using tcp::AttemptId;
using tcp::Handshake;

struct Bounds {
  int num_ranks = 2;
  size_t num_addresses = 1;  // of each rank; the last one is right, nobody listens at the others
  int num_breaks = 0, num_kills = 0, num_closes = 0;
  size_t num_connections = 2;  // of a pair at a time
  bool has_patience = false;   // for ever: no time limit of an answer passes
  bool has_faults() const { return num_breaks + num_kills + num_closes > 0; }
};

enum class Said : uint8_t { hello, welcome, ready, taken, gone, first, bye, end };
enum class At : uint8_t { connecting, open, welcomed, closed };

struct Connection {
  int guest, host;
  uint32_t number;
  bool is_right;
  bool is_cut = false;  // the host hears nothing of it any more, not even its end
  At at_guest = At::connecting, at_host = At::connecting;
  std::vector<Said> to_guest{}, to_host{};
  auto operator<=>(const Connection&) const = default;
};

struct News {
  enum Kind : uint8_t { spoke, ended, end } kind;
  AttemptId id{};
};

// Of a rank towards a peer.
struct End {
  Handshake handshake;
  bool is_introduced = false;
  bool has_timer = false;
  bool is_missed = false;               // the directory is about to look for a farewell
  std::optional<AttemptId> attached{};  // as the transport has it
  bool has_met = false;
  enum Fate : uint8_t { none, closed, died } fate = none;  // of the peer
  std::vector<News> news{};                                // on their way to the handshake
};

struct Rank {
  enum State : uint8_t { open, closing, gone } state = open;
  bool is_killed = false, has_said_farewell = false;
};

struct World {
  std::vector<Rank> ranks{};
  std::map<std::pair<int, int>, End> ends{};
  std::vector<Connection> connections{};
  int num_breaks = 0, num_kills = 0, num_closes = 0;  // so far
};

// Tells worlds apart: of a few million, two have the same number once in ten million runs.
uint64_t digest(const World& world) {
  std::string text;
  const auto put = [&](auto... values) { (text.push_back(static_cast<char>(values)), ...); };
  put(world.num_breaks, world.num_kills, world.num_closes);
  for (const Rank& each : world.ranks) put(each.state, each.is_killed, each.has_said_farewell);
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
          connection->to_host.push_back(Said::ready);
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
    if (world_.ranks[rank].state == Rank::closing) return;  // it does not care any more
    const Rank& other = world_.ranks[peer];
    if (fate == End::closed && !other.has_said_farewell && other.is_killed)
      wrong = "a death is taken for a close";
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
        break;
      case Said::taken:
        e.handshake.taken(connection.number);
        break;
      case Said::gone:
        e.handshake.turned_away();
        break;
      case Said::end:
        e.handshake.failed(connection.number, false);
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
    if (said == Said::hello && connection.at_host == At::open) {
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
    } else {
      close(rank, find(rank, peer, id));
      e.attached.reset();
      e.news.push_back({News::ended, id});
    }
  }

  void leave(int rank, bool is_killed) {
    for (Connection& each : world_.connections) {
      if (each.guest != rank && each.host != rank) continue;
      const bool is_guest = each.guest == rank;
      if ((is_guest ? each.at_guest : each.at_host) == At::closed) continue;
      const int peer = is_guest ? each.host : each.guest;
      const End& e = end(rank, peer);
      const bool is_the_one = e.attached == AttemptId{.is_own = is_guest, .number = each.number};
      // A host that the guest has not spoken to yet says nothing.
      if (!is_killed && is_the_one && (is_guest || e.has_met))
        (is_guest ? each.to_host : each.to_guest).push_back(Said::bye);
      close(rank, &each);
    }
    world_.ranks[rank].state = Rank::gone;
    world_.ranks[rank].is_killed = is_killed;
    for (auto& [pair, e] : world_.ends)  // nothing of it matters any more
      if (pair.first == rank) e = End{Handshake(rank < pair.second)};
  }

  // Forgets what nobody can notice any more.
  void tidy() {
    for (Connection& each : world_.connections) {
      if (each.at_guest == At::closed) each.to_guest.clear();
      if (each.at_host == At::closed || each.is_cut) each.to_host.clear();
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

struct Next {
  World world;
  const char* event;
  std::string wrong;
};

// What may happen next, within the bounds.
void for_each_next(const Bounds& bounds, const World& world,
                   const std::function<void(Next)>& visit) {
  const auto play = [&](const char* event, const std::function<void(Turn&, World&)>& happen) {
    Next next{world, event, ""};
    Turn turn(bounds, next.world);
    happen(turn, next.world);
    turn.tidy();
    next.wrong = turn.wrong;
    std::map<std::pair<int, int>, size_t> num_connections;
    bool is_beyond = false;
    for (const Connection& each : next.world.connections)
      is_beyond |= ++num_connections[std::minmax(each.guest, each.host)] > bounds.num_connections;
    for (const auto& [pair, e] : next.world.ends) is_beyond |= e.news.size() > 2;
    if (!is_beyond) visit(std::move(next));
  };
  const auto is_alive = [&](int rank) { return world.ranks[rank].state != Rank::gone; };
  for (const auto& [pair, e] : world.ends) {
    const auto [rank, peer] = pair;
    if (!is_alive(rank)) continue;
    if (!e.is_introduced)
      play("introduced", [&, rank = rank, peer = peer](Turn& turn, World&) {
        turn.end(rank, peer).is_introduced = true;
        turn.end(rank, peer).handshake.want(bounds.num_addresses);
        turn.carry_out(rank, peer);
      });
    if (e.has_timer)
      play("its time is up", [&, rank = rank, peer = peer](Turn& turn, World&) {
        turn.end(rank, peer).has_timer = false;
        turn.end(rank, peer).handshake.time_is_up();
        turn.carry_out(rank, peer);
      });
    if (!e.news.empty())
      play("news", [&, rank = rank, peer = peer](Turn& turn, World&) {
        End& it = turn.end(rank, peer);
        const News news = it.news.front();
        it.news.erase(it.news.begin());
        if (news.kind == News::spoke) it.handshake.spoke(news.id);
        if (news.kind == News::ended) it.handshake.ended(news.id);
        if (news.kind == News::end) it.handshake.end();
        turn.carry_out(rank, peer);
      });
    if (e.is_missed)
      play("the directory looks", [&, rank = rank, peer = peer](Turn& turn, World& w) {
        End& it = turn.end(rank, peer);
        it.is_missed = false;
        if (it.fate == End::none && !it.attached)
          turn.lose(rank, peer, w.ranks[peer].has_said_farewell ? End::closed : End::died);
      });
  }
  for (size_t idx = 0; idx < world.connections.size(); ++idx) {
    const Connection& c = world.connections[idx];
    const bool guest_lives = is_alive(c.guest) && c.at_guest != At::closed;
    const bool host_lives = is_alive(c.host) && c.at_host != At::closed;
    const bool is_attached_at_guest =
        guest_lives && world.ends.at({c.guest, c.host}).attached == AttemptId{true, c.number};
    const bool is_attached_at_host =
        host_lives && world.ends.at({c.host, c.guest}).attached == AttemptId{false, c.number};
    if (guest_lives && c.at_guest == At::connecting) {
      const bool is_there = c.is_right && is_alive(c.host);
      play(is_there ? "connected" : "refused", [&, idx](Turn& turn, World& w) {
        Connection& it = w.connections[idx];
        const int guest = it.guest, host = it.host;
        if (is_there) {
          it.at_guest = it.at_host = At::open;
          turn.end(guest, host).handshake.connected(it.number);
        } else {
          turn.end(guest, host).handshake.failed(it.number, true);
        }
        turn.carry_out(guest, host);
      });
    }
    if (guest_lives && !is_attached_at_guest && !bounds.has_patience)
      play("the guest's patience ends", [&, idx](Turn& turn, World& w) {
        const Connection it = w.connections[idx];
        turn.end(it.guest, it.host).handshake.failed(it.number, false);
        turn.carry_out(it.guest, it.host);
      });
    if (host_lives && !is_attached_at_host && c.at_host != At::connecting && !bounds.has_patience)
      play("the host's patience ends", [&, idx](Turn& turn, World& w) {
        turn.close(w.connections[idx].host, &w.connections[idx]);
      });
    if (guest_lives && !c.to_guest.empty())
      play("the guest hears", [&, idx](Turn& turn, World& w) {
        Connection& it = w.connections[idx];
        const Said said = it.to_guest.front();
        it.to_guest.erase(it.to_guest.begin());
        turn.hear_as_guest(it, said);
      });
    if (host_lives && !c.to_host.empty())
      play("the host hears", [&, idx](Turn& turn, World& w) {
        Connection& it = w.connections[idx];
        const Said said = it.to_host.front();
        it.to_host.erase(it.to_host.begin());
        turn.hear_as_host(it, said);
      });
    if (world.num_breaks < bounds.num_breaks && guest_lives && host_lives &&
        c.at_host != At::connecting)
      play("a connection breaks", [&, idx](Turn&, World& w) {
        ++w.num_breaks;
        w.connections[idx].to_guest = w.connections[idx].to_host = {Said::end};
      });
    // It would find any cut, but so late that nobody is to depend on it as long as both ranks live.
    if (c.is_cut && host_lives && !is_alive(c.guest))
      play("the heartbeat finds nobody", [&, idx](Turn&, World& w) {
        w.connections[idx].is_cut = false;
        w.connections[idx].to_host = {Said::end};
      });
    if (world.num_breaks < bounds.num_breaks && guest_lives && host_lives &&
        !is_attached_at_guest && c.at_host != At::connecting)
      play("a connection is cut, which its host does not notice", [&, idx](Turn&, World& w) {
        ++w.num_breaks;
        w.connections[idx].is_cut = true;
        w.connections[idx].to_guest = {Said::end};
      });
  }
  for (int rank = 0; rank < bounds.num_ranks; ++rank) {
    if (!is_alive(rank)) continue;
    if (world.num_kills < bounds.num_kills)
      play("a rank is killed", [&, rank](Turn& turn, World& w) {
        ++w.num_kills;
        turn.leave(rank, true);
      });
    if (world.ranks[rank].state == Rank::open && world.num_closes < bounds.num_closes)
      play("a rank begins to close", [&, rank](Turn&, World& w) {
        ++w.num_closes;
        w.ranks[rank].state = Rank::closing;
        for (const auto& [pair, e] : w.ends)
          w.ranks[rank].has_said_farewell |= pair.first == rank && !e.has_met;
      });
    if (world.ranks[rank].state == Rank::closing)
      play("a rank closes", [&, rank](Turn& turn, World&) { turn.leave(rank, false); });
  }
}

// Nobody waits for anything: each pair has met on one connection, or knows that the other has gone.
bool is_settled(const World& world) {
  return std::all_of(world.ends.begin(), world.ends.end(), [&](const auto& each) {
    const auto& [rank, peer] = each.first;
    const End &end = each.second, &other = world.ends.at({peer, rank});
    if (world.ranks[rank].state == Rank::gone) return true;
    if (world.ranks[rank].state == Rank::closing) return false;
    if (end.fate != End::none)
      return other.fate != End::none || world.ranks[peer].state == Rank::gone;
    return world.ranks[peer].state == Rank::open && end.has_met && other.has_met &&
           end.attached->number == other.attached->number &&
           end.attached->is_own != other.attached->is_own;
  });
}

// Two ends that both may send have the same connection.
bool has_two_connections(const World& world) {
  for (const auto& [pair, end] : world.ends) {
    const End& other = world.ends.at({pair.second, pair.first});
    const auto is_free = [](const End& e) {
      return e.attached && (e.attached->is_own || e.has_met);
    };
    if (is_free(end) && is_free(other) &&
        (end.attached->number != other.attached->number ||
         end.attached->is_own == other.attached->is_own))
      return true;
  }
  return false;
}

// Returns the number of worlds.
size_t explore(const Bounds& bounds) {
  World first;
  first.ranks.resize(bounds.num_ranks);
  for (int rank = 0; rank < bounds.num_ranks; ++rank)
    for (int peer = 0; peer < bounds.num_ranks; ++peer)
      if (rank != peer) first.ends.emplace(std::pair(rank, peer), End{Handshake(rank < peer)});
  struct Known {
    size_t parent;
    const char* event;
    bool leads_home = false;
  };
  std::unordered_map<uint64_t, uint32_t> numbers{{digest(first), 0}};
  std::vector<Known> known{{0, "the start"}};
  std::deque<World> open{first};
  std::vector<std::pair<uint32_t, uint32_t>> ways;  // to and from
  std::vector<uint32_t> home;
  const auto fail = [&](uint32_t number, const std::string& what) {
    std::string path;
    for (size_t at = number; at != 0; at = known[at].parent)
      path = std::string("\n      ") + known[at].event + path;
    check::fail(__FILE__, __LINE__, what + " after" + path);
  };
  for (uint32_t here = 0; !open.empty() && check::num_failures == 0; ++here) {
    const World world = std::move(open.front());
    open.pop_front();
    if (has_two_connections(world)) fail(here, "two connections");
    if (is_settled(world)) {
      home.push_back(here);
      known[here].leads_home = true;
    }
    for_each_next(bounds, world, [&](Next next) {
      const auto [it, is_new] =
          numbers.emplace(digest(next.world), static_cast<uint32_t>(known.size()));
      if (is_new) {
        known.push_back({here, next.event});
        open.push_back(std::move(next.world));
      }
      ways.emplace_back(it->second, here);
      if (!next.wrong.empty()) fail(it->second, next.wrong);
    });
  }
  std::sort(ways.begin(), ways.end());
  while (!home.empty()) {
    const uint32_t number = home.back();
    home.pop_back();
    for (auto it = std::lower_bound(ways.begin(), ways.end(), std::pair(number, 0u));
         it != ways.end() && it->first == number; ++it)
      if (!std::exchange(known[it->second].leads_home, true)) home.push_back(it->second);
  }
  // Where every event comes to its turn at last, each way leads home if from everywhere some way does.
  for (uint32_t number = 0; number < known.size() && check::num_failures == 0; ++number)
    if (!known[number].leads_home) fail(number, "somebody waits for ever");
  std::printf("    %zu states\n", known.size());
  return known.size();
}

}  // namespace

TEST(two_ranks_at_once) { explore({.num_connections = 3, .has_patience = true}); }
TEST(two_ranks) { explore({.num_breaks = 1, .num_connections = 3}); }
TEST(two_ranks_with_a_wrong_address) { explore({.num_addresses = 2, .num_breaks = 1}); }
TEST(two_ranks_that_close) { explore({.num_closes = 2}); }
TEST(two_ranks_that_close_or_are_killed) {
  explore({.num_breaks = 1, .num_kills = 1, .num_closes = 1});
}
TEST(three_ranks) {
  explore({.num_ranks = 3, .num_kills = 1, .num_connections = 1, .has_patience = true});
}

// FIPS 180-4 and RFC 4231.
TEST(hashes) {
  const auto bytes = [](const std::string& text) { return std::as_bytes(std::span(text)); };
  const auto hex = [](const Digest& digest) {
    std::string text;
    char digits[3];
    for (const std::byte each : digest) {
      std::snprintf(digits, sizeof digits, "%02x", std::to_integer<unsigned>(each));
      text += digits;
    }
    return text;
  };
  const struct {
    std::string text;
    const char* digest;
  } texts[] = {
      {"", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"},
      {"abc", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"},
      {"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq",
       "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1"},
      {std::string(1'000'000, 'a'),
       "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0"},
  };
  for (const auto& [text, digest] : texts) CHECK_EQ(hex(sha256(bytes(text))), digest);
  const struct {
    std::string key, text;
    const char* digest;
  } keyed[] = {
      {std::string(20, '\x0b'), "Hi There",
       "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7"},
      {"Jefe", "what do ya want for nothing?",
       "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"},
      {std::string(131, '\xaa'), "Test Using Larger Than Block-Size Key - Hash Key First",
       "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54"},
  };
  for (const auto& [key, text, digest] : keyed)
    CHECK_EQ(hex(hmac_sha256(bytes(key), bytes(text))), digest);
}
