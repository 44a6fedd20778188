#include "transport/c10d/connector.h"

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>

#include "message/start_thread.h"
#include "transport/c10d/wire.h"

namespace pipecomm::tcp {
namespace {

using namespace std::chrono_literals;

constexpr uint32_t kHelloMagic = 0x31484350;  // "PCH1"
constexpr auto kHostLimit = 3s;               // for one address
constexpr auto kGreetingLimit = 5s;
constexpr auto kRest = 100ms;  // between two rounds over the addresses of a peer
constexpr size_t kMaxGuests = 4096;

}  // namespace

Connector::Connector(int rank, int size, const Token& token, Socket listener, Socket bell,
                     Events events)
    : rank_(rank),
      size_(size),
      token_(token),
      listener_(std::move(listener)),
      events_(std::move(events)),
      bell_(std::move(bell)) {}

Connector::~Connector() { stop(); }

void Connector::start() {
  thread_ = start_thread([this] { run(); }, rank_);
}

void Connector::stop() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake();
  if (thread_.joinable()) thread_.join();
  attempts_.clear();
  guests_.clear();
  // Ends it for a forked child, too, which would keep the port open.
  if (listener_) ::shutdown(listener_.fd(), SHUT_RD);
  listener_ = {};
}

void Connector::connect(int peer, Contact contact) {
  {
    std::lock_guard lock(mutex_);
    wanted_.emplace_back(peer, std::move(contact));
  }
  wake();
}

std::string Connector::problem(int peer) const {
  std::lock_guard lock(mutex_);
  const auto found = problems_.find(peer);
  return found == problems_.end() ? "" : found->second;
}

void Connector::note_problem(int peer, const std::string& text) {
  std::lock_guard lock(mutex_);
  problems_[peer] = text;
}

void Connector::wake() {
  const uint64_t one = 1;
  (void)!::write(bell_.fd(), &one, sizeof one);  // fails only if it has been rung already
}

// ------------------------------------------------------------------------------------------------
// the thread

void Connector::run() {
  std::vector<pollfd> polled;
  while (true) {
    take_wanted();
    {
      std::lock_guard lock(mutex_);
      if (stopping_) return;
    }
    const bool has_room = guests_.size() < kMaxGuests;
    polled.assign({{bell_.fd(), POLLIN, 0}, {has_room ? listener_.fd() : -1, POLLIN, 0}});
    for (const auto& [peer, attempt] : attempts_) {  // a negative descriptor is passed over
      const bool connects = attempt.stage == Stage::connecting;
      polled.push_back({attempt.socket.fd(), static_cast<short>(connects ? POLLOUT : POLLIN), 0});
    }
    for (const Guest& guest : guests_) polled.push_back({guest.socket.fd(), POLLIN, 0});
    const Deadline next = next_deadline();
    const auto left = std::chrono::duration_cast<std::chrono::nanoseconds>(next - Clock::now());
    const auto wait = std::clamp<std::chrono::nanoseconds>(left, 0s, 60s).count();
    const timespec limit{.tv_sec = wait / 1'000'000'000, .tv_nsec = wait % 1'000'000'000};
    ppoll(polled.data(), polled.size(), next == Deadline::max() ? nullptr : &limit, nullptr);

    uint64_t count;
    (void)!::read(bell_.fd(), &count, sizeof count);
    size_t idx = 2;
    for (auto it = attempts_.begin(); it != attempts_.end();) {
      const auto each = it++;
      if (!advance(each->first, each->second, polled[idx++].revents != 0)) attempts_.erase(each);
    }
    for (auto it = guests_.begin(); it != guests_.end();) {
      const auto each = it++;
      if (!advance(*each, polled[idx++].revents != 0)) guests_.erase(each);
    }
    if (polled[1].revents == 0) continue;
    try {
      while (guests_.size() < kMaxGuests) {
        Socket socket = accept_from(listener_);
        if (!socket) break;
        guests_.push_back({std::move(socket), {}, Clock::now() + kGreetingLimit});
      }
    } catch (const std::system_error&) {
      std::this_thread::sleep_for(kRest);  // no descriptor is left: the peer waits in the queue
    }
  }
}

void Connector::take_wanted() {
  std::vector<std::pair<int, Contact>> wanted;
  {
    std::lock_guard lock(mutex_);
    wanted.swap(wanted_);
  }
  for (auto& [peer, contact] : wanted)
    if (!connected_.contains(peer) && !attempts_.contains(peer)) {
      Attempt& attempt = attempts_[peer];
      attempt.contact = std::move(contact);
      attempt.until = Clock::now();
      if (!advance(peer, attempt, false)) attempts_.erase(peer);
    }
}

Deadline Connector::next_deadline() const {
  Deadline next = Deadline::max();
  for (const auto& [peer, attempt] : attempts_) next = std::min(next, attempt.until);
  for (const Guest& guest : guests_) next = std::min(next, guest.until);
  return next;
}

// ------------------------------------------------------------------------------------------------
// connecting

bool Connector::advance(int peer, Attempt& attempt, bool is_ready) {
  if (attempt.stage == Stage::connecting && is_ready) {
    if (const int error = error_of(attempt.socket)) {
      host_failed(peer, attempt, error_text(error), error == ECONNREFUSED);
    } else if (say(attempt.socket, Kind::hello, peer)) {
      attempt.stage = Stage::greeting;
      attempt.until = Clock::now() + kGreetingLimit;
    } else {
      host_failed(peer, attempt, "the connection broke", true);
    }
  } else if (attempt.stage == Stage::greeting && is_ready) {
    const Read result = read(attempt.socket, attempt.reply);
    Hello hello;
    std::memcpy(&hello, attempt.reply.bytes.data(), sizeof hello);
    if (result == Read::broken) {
      host_failed(peer, attempt, "the connection was closed", true);
    } else if (result == Read::whole) {
      if (!is_ours(hello) || static_cast<int>(hello.from) != peer) {
        host_failed(peer, attempt, "another program answers", true);
      } else if (hello.kind == Kind::welcome) {
        connected_.insert(peer);
        events_.on_connected(peer, std::move(attempt.socket));
        return false;
      } else {
        rest(attempt);  // the peer is about to connect to us
      }
    }
  } else if (Clock::now() >= attempt.until) {
    if (attempt.stage == Stage::resting)
      try_next_host(peer, attempt);
    else
      host_failed(peer, attempt, "no answer", false);
  }
  // Nothing is left to try in this round.
  const size_t num_hosts = attempt.contact.hosts.size();
  if (attempt.stage != Stage::resting || attempt.host_idx < num_hosts) return true;
  if (attempt.num_refused == num_hosts) {
    events_.on_unreachable(peer, problem(peer));
    return false;
  }
  rest(attempt);
  return true;
}

void Connector::rest(Attempt& attempt) {
  attempt.stage = Stage::resting;
  attempt.host_idx = attempt.num_refused = 0;
  attempt.socket = {};
  attempt.until = Clock::now() + kRest;
}

void Connector::try_next_host(int peer, Attempt& attempt) {
  const Contact& contact = attempt.contact;
  while (attempt.host_idx < contact.hosts.size()) {
    attempt.reply = {};
    try {
      attempt.socket = start_connecting({contact.hosts[attempt.host_idx], contact.port});
      attempt.stage = Stage::connecting;
      attempt.until = Clock::now() + kHostLimit;
      return;
    } catch (const std::system_error& error) {
      attempt.stage = Stage::resting;
      note_problem(peer, "connecting to " +
                             Address{contact.hosts[attempt.host_idx], contact.port}.text() + ": " +
                             error.what());
      attempt.num_refused += error.code() == std::errc::connection_refused;
      ++attempt.host_idx;
    }
  }
}

void Connector::host_failed(int peer, Attempt& attempt, const std::string& why, bool is_refusal) {
  const Contact& contact = attempt.contact;
  note_problem(peer, "connecting to " +
                         Address{contact.hosts[attempt.host_idx], contact.port}.text() + ": " +
                         why);
  attempt.num_refused += is_refusal;
  ++attempt.host_idx;
  attempt.socket = {};
  attempt.stage = Stage::resting;
  try_next_host(peer, attempt);
}

// ------------------------------------------------------------------------------------------------
// welcoming

bool Connector::advance(Guest& guest, bool is_ready) {
  if (!is_ready) return Clock::now() < guest.until;
  const Read result = read(guest.socket, guest.hello);
  if (result == Read::not_yet) return true;
  Hello hello;
  std::memcpy(&hello, guest.hello.bytes.data(), sizeof hello);
  if (result == Read::whole && is_ours(hello) && hello.kind == Kind::hello) meet(guest, hello);
  return false;
}

void Connector::meet(Guest& guest, const Hello& hello) {
  const int peer = static_cast<int>(hello.from);
  const auto attempt = attempts_.find(peer);
  if (peer > rank_ && attempt != attempts_.end() && attempt->second.stage != Stage::resting) {
    say(guest.socket, Kind::busy, peer);
    return;
  }
  if (connected_.contains(peer) || !say(guest.socket, Kind::welcome, peer)) return;
  // An attempt of our own that is being advanced further up is never the one of a guest.
  if (attempt != attempts_.end()) attempts_.erase(attempt);
  connected_.insert(peer);
  events_.on_connected(peer, std::move(guest.socket));
}

Connector::Read Connector::read(const Socket& socket, Incoming& incoming) const {
  while (incoming.num_read < incoming.bytes.size()) {
    const ssize_t count = recv(socket.fd(), incoming.bytes.data() + incoming.num_read,
                               incoming.bytes.size() - incoming.num_read, MSG_DONTWAIT);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return Read::not_yet;
    if (count <= 0) return Read::broken;
    incoming.num_read += static_cast<size_t>(count);
  }
  return Read::whole;
}

bool Connector::is_ours(const Hello& hello) const {
  return hello.magic == kHelloMagic && hello.version == wire::kVersion && hello.token == token_ &&
         hello.to == static_cast<uint32_t>(rank_) && hello.from < static_cast<uint32_t>(size_) &&
         hello.from != static_cast<uint32_t>(rank_);
}

// The buffer of a new socket has room for it.
bool Connector::say(const Socket& socket, Kind kind, int to) const {
  const Hello hello{
      kHelloMagic, wire::kVersion, kind, static_cast<uint32_t>(rank_), static_cast<uint32_t>(to),
      token_};
  return send(socket.fd(), &hello, sizeof hello, MSG_DONTWAIT | MSG_NOSIGNAL) == sizeof hello;
}

}  // namespace pipecomm::tcp
