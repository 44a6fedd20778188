#include "transport/tcp/connector.h"

#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <system_error>
#include <tuple>

#include "message/start_thread.h"
#include "transport/tcp/events.h"

namespace pipecomm::tcp {
namespace {

using namespace std::chrono_literals;

constexpr size_t kMaxGuests = 64;
constexpr int kReservedDescriptors = 32;

int first_reserved_fd() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur > INT_MAX) return INT_MAX;
  return std::max(0, static_cast<int>(limit.rlim_cur) - kReservedDescriptors);
}

}  // namespace

Connector::Connector(int rank, int size, const Key& key, const ConnectorLimits& limits,
                     std::vector<Socket> listeners, Socket bell, Events events)
    : rank_(rank),
      size_(size),
      key_(key),
      limits_(limits),
      listeners_(std::move(listeners)),
      events_(std::move(events)),
      bell_(std::move(bell)),
      first_reserved_fd_(first_reserved_fd()) {}

Connector::~Connector() { stop(); }

void Connector::start() {
  const auto guarded = [this] {
    try {
      run();
    } catch (const std::exception& error) {
      events_.on_broken(error.what());
    }
  };
  thread_ = start_thread(guarded, rank_);
}

void Connector::stop() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  ring(bell_);
  if (thread_.joinable()) thread_.join();
  pairs_.clear();
  guests_.clear();
  // Also closes them for a forked child, which would keep the port open.
  for (const Socket& listener : listeners_) ::shutdown(listener.fd(), SHUT_RD);
  listeners_.clear();
}

void Connector::connect(int peer, Contact contact) {
  tell(peer, [contact = std::move(contact)](Pair& pair) {
    pair.contact = contact;
    pair.handshake.want(contact.hosts.size());
  });
}

void Connector::spoke(int peer, AttemptId id) {
  tell(peer, [id](Pair& pair) { pair.handshake.spoke(id); });
}

void Connector::ended(int peer, AttemptId id, const std::string& why) {
  note_problem(peer, "its connection", {.why = why});
  tell(peer, [id](Pair& pair) { pair.handshake.ended(id); });
}

void Connector::end(int peer) {
  tell(peer, [](Pair& pair) { pair.handshake.end(); });
}

void Connector::tell(int peer, std::function<void(Pair&)> what) {
  std::lock_guard lock(mutex_);
  news_.emplace_back(peer, std::move(what));
  ring(bell_);
}

std::string Connector::problem(int peer) const {
  std::lock_guard lock(mutex_);
  const auto found = problems_.find(peer);
  if (found == problems_.end()) return "";
  std::string refused, others;
  for (const auto& [address, problem] : found->second) {
    if (problem.is_refusal)
      refused += (refused.empty() ? "nobody listens at " : " and ") + address;
    else
      others += (others.empty() ? "" : "; ") + address + ": " + problem.why;
  }
  if (refused.empty()) return others;
  return refused +
         ": its process has ended, or it is the wrong interface (GLOO_SOCKET_IFNAME), or a "
         "firewall" +
         (others.empty() ? "" : "; ") + others;
}

void Connector::note_problem(int peer, const std::string& address, Problem problem) {
  std::lock_guard lock(mutex_);
  problems_[peer][address] = std::move(problem);
}

// ------------------------------------------------------------------------------------------------
// the thread

void Connector::run() {
  while (take_news()) {
    wait_for_events();
    for (auto& [peer, pair] : pairs_) {
      // Handling one attempt may end any other, and begin some that are not due in this turn.
      const auto next = [&tries = pair.tries] {
        return std::find_if(tries.begin(), tries.end(),
                            [](const Try& each) { return each.is_due; });
      };
      for (auto it = next(); it != pair.tries.end(); it = next()) {
        it->is_due = false;
        advance(peer, pair, *it);
        carry_out(peer, pair);
      }
      if (Clock::now() < pair.due) continue;
      pair.due = Deadline::max();
      pair.handshake.time_is_up();
      carry_out(peer, pair);
    }
    guests_.remove_if([this](Guest& guest) { return guest.is_due && !advance(guest); });
    for (size_t idx = 0; idx < listeners_.size(); ++idx)
      if (has_callers_[idx]) accept_guests(listeners_[idx]);
  }
}

bool Connector::take_news() {
  News news;
  {
    std::lock_guard lock(mutex_);
    if (stopping_) return false;
    news.swap(news_);
  }
  for (const auto& [peer, tell_pair] : news) {
    Pair& pair = pair_of(peer);
    tell_pair(pair);
    carry_out(peer, pair);
  }
  return true;
}

// Marks the attempts and guests that are due: data have arrived, or their time is up.
void Connector::wait_for_events() {
  std::vector<pollfd> polled{{bell_.fd(), POLLIN, 0}};
  const Deadline room_at = is_full() ? may_go_at(*first_to_go()) : Clock::now();
  const bool has_room = room_at <= Clock::now();
  Deadline next = has_room ? Deadline::max() : room_at;
  for (const Socket& listener : listeners_)
    polled.push_back({has_room ? listener.fd() : -1, POLLIN, 0});
  for (const auto& [peer, pair] : pairs_) {
    next = std::min(next, pair.due);
    for (const Try& each : pair.tries) {
      const short events = each.is_connected ? POLLIN : POLLOUT;
      polled.push_back({each.socket.fd(), events, 0});
      next = std::min(next, each.until);
    }
  }
  for (const Guest& guest : guests_) {
    polled.push_back({guest.socket.fd(), POLLIN, 0});
    next = std::min(next, guest.until);
  }
  const auto left = std::chrono::duration_cast<std::chrono::nanoseconds>(next - Clock::now());
  const auto wait = std::clamp<std::chrono::nanoseconds>(left, 0s, 60s).count();
  const timespec limit{.tv_sec = wait / 1'000'000'000, .tv_nsec = wait % 1'000'000'000};
  ppoll(polled.data(), polled.size(), next == Deadline::max() ? nullptr : &limit, nullptr);

  silence(bell_);
  auto it = polled.begin() + 1;
  has_callers_.clear();
  while (has_callers_.size() < listeners_.size()) has_callers_.push_back((it++)->revents != 0);
  const auto now = Clock::now();
  for (auto& [peer, pair] : pairs_)
    for (Try& each : pair.tries) {
      each.has_news = (it++)->revents != 0;
      each.is_due = each.has_news || now >= each.until;
    }
  for (Guest& guest : guests_) guest.is_due = (it++)->revents != 0 || now >= guest.until;
}

Connector::Pair& Connector::pair_of(int peer) {
  return pairs_.try_emplace(peer, rank_ < peer).first->second;
}

void Connector::carry_out(int peer, Pair& pair) {
  using Deed = Handshake::Deed;
  while (const auto step = pair.handshake.next_step()) {
    const auto attempt = std::find_if(pair.tries.begin(), pair.tries.end(),
                                      [&](const Try& each) { return each.number == step->number; });
    switch (step->deed) {
      case Deed::dial:
        dial(peer, pair, *step);
        break;
      case Deed::say_hello:
      case Deed::say_ready: {
        const Word word = step->deed == Deed::say_hello ? Word::hello : Word::ready;
        attempt->until = Clock::now() + limits_.greeting;
        if (!say(attempt->socket, word, peer, attempt->number, attempt->nonces))
          fail(peer, pair, *attempt, "the connection broke");
        break;
      }
      case Deed::drop:
        pair.tries.erase(attempt);
        break;
      case Deed::hand_over: {
        Socket socket = std::move(attempt->socket);
        pair.tries.erase(attempt);
        connected(peer, std::move(socket), {.is_own = true, .number = step->number});
        break;
      }
      case Deed::rest:
        pair.due = Clock::now() + limits_.rest;
        break;
      case Deed::miss:
        events_.on_missed(peer, problem(peer));
        break;
    }
  }
}

// ------------------------------------------------------------------------------------------------
// connecting

void Connector::dial(int peer, Pair& pair, const Handshake::Step& step) {
  const auto now = Clock::now();
  Try& attempt = pair.tries.emplace_back();
  attempt.number = step.number;
  attempt.address = {pair.contact.hosts[step.address], pair.contact.port};
  attempt.until = now + limits_.connecting;
  pair.due = now + limits_.next_address;
  try {
    attempt.nonces.guest = draw_nonce();
    attempt.socket = start_connecting(attempt.address);
  } catch (const std::system_error& error) {
    if (error.code() == std::errc::connection_refused) return refused(peer, pair, attempt);
    fail(peer, pair, attempt, error.what());
  }
}

// `is_elsewhere`: the peer is not at that address.
void Connector::fail(int peer, Pair& pair, const Try& attempt, const std::string& why,
                     bool is_elsewhere) {
  note_problem(peer, attempt.address.text(), {.why = why});
  pair.handshake.failed(attempt.number, is_elsewhere);
}

void Connector::refused(int peer, Pair& pair, const Try& attempt) {
  note_problem(peer, attempt.address.text(), {.is_refusal = true});
  pair.handshake.failed(attempt.number, true);
}

void Connector::advance(int peer, Pair& pair, Try& attempt) {
  if (!attempt.is_connected) {
    if (!attempt.has_news) return fail(peer, pair, attempt, "no answer");
    const int error = error_of(attempt.socket);
    if (error == ECONNREFUSED) return refused(peer, pair, attempt);
    if (error != 0) return fail(peer, pair, attempt, error_text(error));
    attempt.is_connected = true;
    return pair.handshake.connected(attempt.number);
  }
  const Read result = read(attempt.socket, attempt.in);
  if (result == Read::broken) return fail(peer, pair, attempt, "the connection was closed");
  if (result == Read::whole) {
    attempt.in.num_read = 0;
    return hear(peer, pair, attempt, attempt.in.greeting);
  }
  if (Clock::now() >= attempt.until) fail(peer, pair, attempt, "no answer");
}

void Connector::hear(int peer, Pair& pair, Try& attempt, const Greeting& greeting) {
  if (!is_greeting(greeting, peer, rank_) || greeting.attempt != attempt.number)
    return fail(peer, pair, attempt, "another program answers", true);
  if (greeting.word != Word::taken) attempt.nonces.listener = greeting.nonce;
  if (!is_proven(greeting, attempt.nonces, key_))
    return fail(peer, pair, attempt,
                "does not prove that it belongs; is PIPECOMM_SECRET equal on all ranks?", true);
  switch (greeting.word) {
    case Word::welcome:
      return pair.handshake.welcomed(attempt.number);
    case Word::taken:
      return pair.handshake.taken(attempt.number);
    case Word::gone:
      note_problem(peer, "its answer", {.why = "it has given up the connection to this rank"});
      return pair.handshake.turned_away();
    case Word::hello:
    case Word::ready:
      fail(peer, pair, attempt, "it says what only a guest says");
  }
}

// ------------------------------------------------------------------------------------------------
// welcoming

// The first word of a peer mostly arrives with its connection.
void Connector::accept_guests(const Socket& listener) {
  try {
    for (size_t num_left = kMaxGuests; num_left > 0; --num_left) {
      const auto now = Clock::now();
      const auto leaving = is_full() ? first_to_go() : guests_.end();
      if (leaving != guests_.end() && now < may_go_at(*leaving)) return;  // the next one waits
      Socket socket = accept_from(listener);
      if (!socket) return;
      if (leaving != guests_.end()) guests_.erase(leaving);
      guests_.push_back(
          {.socket = std::move(socket), .came_at = now, .until = now + limits_.greeting});
      if (!advance(guests_.back())) guests_.pop_back();
    }
  } catch (const std::system_error&) {
    std::this_thread::sleep_for(limits_.rest);  // no file descriptor is left: the peer waits
  }
}

bool Connector::is_full() const {
  return guests_.size() >= kMaxGuests ||
         std::any_of(guests_.begin(), guests_.end(), [this](const Guest& guest) {
           return guest.socket.fd() >= first_reserved_fd_;
         });
}

Deadline Connector::may_go_at(const Guest& guest) const {
  return guest.came_at + (guest.peer < 0 ? limits_.silent_guest : limits_.guest);
}

// Among guests that may be dropped, first one with a descriptor of the reserve, then a silent one,
// then the oldest; else the guest that may be dropped next.
std::list<Connector::Guest>::iterator Connector::first_to_go() {
  const auto now = Clock::now();
  const auto rank_of = [&](const Guest& guest) {
    return std::tuple(std::max(now, may_go_at(guest)), guest.socket.fd() < first_reserved_fd_,
                      guest.peer >= 0);
  };
  return std::min_element(
      guests_.begin(), guests_.end(),
      [&](const Guest& one, const Guest& other) { return rank_of(one) < rank_of(other); });
}

bool Connector::advance(Guest& guest) {
  const Read result = read(guest.socket, guest.in);
  if (result == Read::not_yet) return Clock::now() < guest.until;
  if (result == Read::broken) return false;
  guest.in.num_read = 0;
  if (guest.peer < 0) return welcome(guest, guest.in.greeting);
  take(guest, guest.in.greeting);
  return false;
}

bool Connector::welcome(Guest& guest, const Greeting& hello) {
  const int peer = static_cast<int>(hello.from);
  if (hello.from >= static_cast<uint32_t>(size_) || peer == rank_ || hello.word != Word::hello ||
      !is_greeting(hello, peer, rank_))
    return false;
  const auto answer = pair_of(peer).handshake.answer();
  if (answer == Handshake::Answer::none) return false;
  try {
    guest.nonces = {.guest = hello.nonce, .listener = draw_nonce()};
  } catch (const std::system_error&) {
    return false;
  }
  guest.peer = peer;
  guest.attempt = hello.attempt;
  guest.until = Clock::now() + limits_.greeting;
  const bool is_welcome = answer == Handshake::Answer::welcome;
  const Word word = is_welcome ? Word::welcome : Word::gone;
  return say(guest.socket, word, peer, guest.attempt, guest.nonces) && is_welcome;
}

void Connector::take(Guest& guest, const Greeting& ready) {
  if (!is_greeting(ready, guest.peer, rank_) || ready.word != Word::ready ||
      ready.attempt != guest.attempt || !is_proven(ready, guest.nonces, key_))
    return;
  Pair& pair = pair_of(guest.peer);
  if (!pair.handshake.take(guest.attempt)) return;
  carry_out(guest.peer, pair);
  say(guest.socket, Word::taken, guest.peer, guest.attempt, guest.nonces);  // or the socket breaks
  connected(guest.peer, std::move(guest.socket), {.is_own = false, .number = guest.attempt});
}

void Connector::connected(int peer, Socket socket, AttemptId id) {
  {
    std::lock_guard lock(mutex_);
    problems_.erase(peer);
  }
  events_.on_connected(peer, std::move(socket), id);
}

Connector::Read Connector::read(const Socket& socket, Incoming& incoming) {
  auto* const bytes = reinterpret_cast<std::byte*>(&incoming.greeting);
  while (incoming.num_read < sizeof(Greeting)) {
    const ssize_t count = recv(socket.fd(), bytes + incoming.num_read,
                               sizeof(Greeting) - incoming.num_read, MSG_DONTWAIT);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return Read::not_yet;
    if (count <= 0) return Read::broken;
    incoming.num_read += static_cast<size_t>(count);
  }
  return Read::whole;
}

// The buffer of a new socket has room for it.
bool Connector::say(const Socket& socket, Word word, int to, uint32_t attempt,
                    const Nonces& nonces) const {
  const Greeting greeting = make_greeting(word, rank_, to, attempt, nonces, key_);
  return send(socket.fd(), &greeting, sizeof greeting, MSG_DONTWAIT | MSG_NOSIGNAL) ==
         sizeof greeting;
}

}  // namespace pipecomm::tcp
