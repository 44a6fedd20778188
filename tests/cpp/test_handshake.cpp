// Two ranks settle on one connection: all possible events, in any order, within bounds. The model
// is in handshake_world.h.
#include <unordered_map>

#include "handshake_world.h"
#include "transport/tcp/sha256.h"

namespace {

using namespace handshake_model;

struct Next {
  World world;
  const char* event;
  std::string wrong;
};

// All possible next events, within the bounds.
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
      play("the directory looks", [&, rank = rank, peer = peer](Turn& turn, World&) {
        End& it = turn.end(rank, peer);
        it.is_missed = false;
        if (it.fate == End::none && !it.attached) turn.look_for(rank, peer);
      });
    if (world.ranks[peer].has_child && world.ranks[peer].has_ended && e.fate == End::none)
      play("a process is seen to have ended",
           [&, rank = rank, peer = peer](Turn& turn, World&) { turn.lose(rank, peer, End::died); });
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
      const bool is_there = c.is_right && (is_alive(c.host) || world.ranks[c.host].has_child);
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
    // Keepalive detects any cut, but so late that no rank may depend on it while both live.
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
    if (world.ranks[rank].is_killed && !world.ranks[rank].has_ended)
      play("its process has ended", [&, rank](Turn&, World& w) { w.ranks[rank].has_ended = true; });
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

// No rank waits: each pair has met on one connection, or knows that the other rank has gone.
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

// The number of worlds found, and the first error with the events that lead to it.
struct Outcome {
  size_t num_states = 0;
  std::string wrong{};
};

Outcome explore(const Bounds& bounds) {
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
  std::string wrong;
  const auto note = [&](uint32_t number, const std::string& what) {
    if (!wrong.empty()) return;
    for (size_t at = number; at != 0; at = known[at].parent)
      wrong = std::string("\n      ") + known[at].event + wrong;
    wrong = what + " after" + wrong;
  };
  for (uint32_t here = 0; !open.empty() && wrong.empty(); ++here) {
    const World world = std::move(open.front());
    open.pop_front();
    if (has_two_connections(world)) note(here, "two connections");
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
      if (!next.wrong.empty()) note(it->second, next.wrong);
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
  // If every event happens eventually, only a world without a path to a settled one gets stuck.
  for (uint32_t number = 0; number < known.size() && wrong.empty(); ++number)
    if (!known[number].leads_home) note(number, "somebody waits for ever");
  return {known.size(), wrong};
}

void expect_no_wrong(const Bounds& bounds) {
  const Outcome outcome = explore(bounds);
  if (!outcome.wrong.empty()) check::fail(__FILE__, __LINE__, outcome.wrong);
  std::printf("    %zu states\n", outcome.num_states);
}

}  // namespace

TEST(two_ranks_at_once) { expect_no_wrong({.num_connections = 3, .has_patience = true}); }
TEST(two_ranks) { expect_no_wrong({.num_breaks = 1, .num_connections = 3}); }
TEST(two_ranks_with_a_wrong_address) { expect_no_wrong({.num_addresses = 2, .num_breaks = 1}); }
TEST(two_ranks_that_close) { expect_no_wrong({.num_closes = 2}); }
TEST(two_ranks_that_close_or_are_killed) {
  expect_no_wrong({.num_breaks = 1, .num_kills = 1, .num_closes = 1});
}
TEST(two_ranks_that_leave_children) {
  expect_no_wrong({.num_breaks = 1, .num_kills = 1, .num_closes = 1, .has_children = true});
}
TEST(three_ranks) {
  expect_no_wrong({.num_ranks = 3, .num_kills = 1, .num_connections = 1, .has_patience = true});
}

// Rules that this library had, each alone and all together: the model finds the errors that real ranks made.
TEST(former_rules) {
  const Rules all{.has_confirmation = false,
                  .tries_again = false,
                  .replaces_silent = false,
                  .asks_the_store = false};
  const struct {
    Bounds bounds;
    const char *wrong, *event;
  } mutants[] = {
      // A rank is killed, and its sockets close before its process has ended.
      {{.num_kills = 1, .has_patience = true, .rules = all},
       "a death is taken for a close",
       "a rank is killed"},
      {{.num_kills = 1, .has_patience = true, .rules = {.asks_the_store = false}},
       "a death is taken for a close",
       "a rank is killed"},
      // A rank is stopped for longer than the other one waits for an answer; nothing fails.
      {{.rules = all}, "a rank that is open has closed", "the guest's patience ends"},
      {{.rules = {.replaces_silent = false}},
       "a peer that lives is lost",
       "the guest's patience ends"},
      {{.rules = {.tries_again = false}}, "a peer that lives is lost", "the host's patience ends"},
      // The answer gets lost. The host has a connection, and the guest has none.
      {{.num_breaks = 1, .rules = {.has_confirmation = false}},
       "somebody waits for ever",
       "a connection breaks"},
  };
  for (const auto& mutant : mutants) {
    const Outcome outcome = explore(mutant.bounds);
    std::printf("    %zu states, then %s\n", outcome.num_states, outcome.wrong.c_str());
    CHECK_CONTAINS(outcome.wrong, mutant.wrong);
    CHECK_CONTAINS(outcome.wrong, mutant.event);
  }
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
