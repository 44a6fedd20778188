// Peers of the TCP transport: making, connecting, missing and losing them.
#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>

#include "message/message_copy.h"
#include "transport/tcp/events.h"
#include "transport/tcp/tcp_transport.h"

namespace pipecomm::tcp {

TcpTransport::Peer& TcpTransport::peer_for(int peer_idx) {
  if (Peer* const peer = find(peer_idx)) return *peer;
  std::lock_guard lock(making_mutex_);
  if (Peer* const peer = find(peer_idx)) return *peer;
  made_.push_back(std::make_unique<Peer>(options_.rank, peer_idx, options_.epoch));
  Peer& peer = *made_.back();
  if (failure_) {
    peer.connection.link().say_failure(*failure_);
    peer.connection.drop();
  }
  if (disconnecting_) peer.connection.link().say_goodbye();
  {
    std::lock_guard close_lock(close_mutex_);
    ++num_open_;
  }
  const auto known = introductions_.find(peer_idx);
  const bool is_known = known != introductions_.end();
  if (is_known)
    start_connecting_to(peer, known->second);
  else
    enter(peer, PeerState::wanted);
  peers_[peer_idx].store(&peer, std::memory_order_release);
  if (!is_known && options_.on_wanted) options_.on_wanted(peer_idx);
  return peer;
}

// With the peer's lock held, if other threads know it.
void TcpTransport::enter(Peer& peer, PeerState state, const std::string& detail) {
  connection_events_->enter(peer.state, state, "tcp", peer.connection.link().peer(), detail);
}

// With `making_mutex_` held, and the peer's lock, if other threads know it.
void TcpTransport::start_connecting_to(Peer& peer, const Introduction& introduction) {
  peer.pid = introduction.pid;
  if (peer.state < PeerState::connecting) {
    std::string hosts;
    for (const std::string& host : introduction.hosts) hosts += host + " ";
    enter(peer, PeerState::connecting, hosts + "port " + std::to_string(introduction.port));
  }
  connector_->connect(peer.connection.link().peer(), {introduction.hosts, introduction.port});
}

void TcpTransport::introduce(int peer_idx, const Introduction& introduction) {
  std::lock_guard lock(making_mutex_);
  if (!introductions_.emplace(peer_idx, introduction).second) return;
  if (Peer* const peer = find(peer_idx)) {
    std::lock_guard peer_lock(peer->mutex);
    start_connecting_to(*peer, introduction);
  }
}

// On the connector's thread.
void TcpTransport::connected(int peer_idx, Socket socket, AttemptId attempt) {
  if (options_.on_connected) options_.on_connected(peer_idx);
  Peer& peer = peer_for(peer_idx);
  std::unique_lock lock(peer.mutex);
  if (stopping_ || peer.is_over() || peer.connection.link().has_met_peer()) return;
  detach(peer);  // from an older attempt, on which nothing was sent
  if (closing_) say_closing(peer);
  keep_alive(socket, options_.heartbeat, options_.heartbeat_limit);
  peer.num_ticks_left = Peer::kLastTicks;
  peer.attempt = attempt;
  peer.connection.attach(std::move(socket), attempt.is_own);
  if (peer.state != PeerState::closing)
    enter(peer, PeerState::attached, attempt.is_own ? "by this rank" : "by the peer");
  if (!try_watch(sockets_, EPOLL_CTL_ADD, peer.connection.socket(), EPOLLIN | EPOLLRDHUP,
                 static_cast<uint32_t>(peer_idx)))
    return lost(peer, lock, "epoll_ctl: " + error_text(errno));
  write(peer);
  act(peer, lock);
}

// On the connector's thread.
void TcpTransport::missed(int peer_idx, const std::string& why) {
  Peer& peer = peer_for(peer_idx);
  std::unique_lock lock(peer.mutex);
  if (stopping_ || peer.is_over() || peer.connection.attached()) return;
  miss(peer, lock, why);
}

// A forked child may also hold the socket, and would keep it in the event queue.
void TcpTransport::detach(Peer& peer) {
  if (peer.connection.attached())
    try_watch(sockets_, EPOLL_CTL_DEL, peer.connection.socket(), 0, 0);
  peer.wants_out = false;
  peer.connection.detach();
}

// With the peer's lock held, which is released. The connection has ended before the peer has
// spoken: the peer closed, died, or abandoned this attempt and makes another one.
void TcpTransport::ended_unmet(Peer& peer, std::unique_lock<std::mutex>& lock,
                               const std::string& why) {
  const bool has_left = peer.state == PeerState::closing;
  if (has_left) peer.connection.link().leave();
  if (disconnecting_ || has_left) return lost(peer, lock, why);
  detach(peer);
  enter(peer, PeerState::connecting, why);
  connector_->ended(peer.connection.link().peer(), peer.attempt, why);
  lock.unlock();
}

// With the peer's lock held, which is released. Ranks listen as long as their communicator is open.
void TcpTransport::miss(Peer& peer, std::unique_lock<std::mutex>& lock, const std::string& why) {
  if (disconnecting_) return lost(peer, lock, why);
  detach(peer);
  enter(peer, PeerState::missed, why);
  peer.watch.reset();
  lock.unlock();
  if (options_.on_missed) options_.on_missed(peer.connection.link().peer(), why);
}

void TcpTransport::note_gone(int peer_idx, bool has_closed, const std::string& why) {
  Peer& peer = peer_for(peer_idx);
  std::unique_lock lock(peer.mutex);
  if (stopping_ || peer.is_over()) return;
  if (peer.connection.attached()) {
    if (has_closed && peer.state != PeerState::closing)
      enter(peer, PeerState::closing, "has left a farewell");
    return;
  }
  if (has_closed) peer.connection.link().leave();
  bool has_ended = false;
  try {
    has_ended = peer.pid != 0 && ProcessWatch(peer.pid).has_ended();
  } catch (const std::system_error&) {
    // The state of its process is unknown.
  }
  lost(peer, lock, has_ended ? "its process has ended" : why);
}

bool TcpTransport::has_met(int peer_idx) const {
  Peer* const peer = find(peer_idx);
  if (!peer) return false;
  std::lock_guard lock(peer->mutex);
  return peer->connection.link().has_met_peer();
}

void TcpTransport::note_closed(Peer& peer) {
  if (!std::exchange(peer.is_open, false)) return;
  std::lock_guard close_lock(close_mutex_);
  --num_open_;
  close_changed_.notify_all();
}

// With the peer's lock held, which is released, unless the peer was lost before.
void TcpTransport::lost(Peer& peer, std::unique_lock<std::mutex>& lock, const std::string& why) {
  if (peer.is_over()) return;
  PeerLink& link = peer.connection.link();
  // Its earlier packets may explain its end.
  const bool orderly =
      disconnecting_ || link.state() == PeerLink::State::disconnecting || link.failure();
  enter(peer, orderly ? PeerState::closed : PeerState::lost, why);
  detach(peer);
  peer.watch.reset();
  connector_->end(link.peer());
  if (!orderly) {
    // All operations fail for this cause before the messages to and from this peer end one by one, which
    // any thread may settle.
    lock.unlock();
    events_.on_peer_lost(link.peer(), why);
    lock.lock();
  }
  link.lose();
  note_closed(peer);
  act(peer, lock);
}

// Writes payloads that are spread over tensors, then releases the lock and carries out the decisions of the
// link. User code may run here.
void TcpTransport::act(Peer& peer, std::unique_lock<std::mutex>& lock) {
  PeerLink& link = peer.connection.link();
  auto outcomes = link.take_outcomes();
  const auto num_outcomes = static_cast<int64_t>(outcomes.size());
  const auto control = link.take_control();
  const std::optional<Failure> failure = link.failure();
  const bool is_news = failure && !std::exchange(peer.failure_told, true);
  const auto is_spread = [](const PeerLink::Outcome& outcome) {
    const Request& request = *outcome.request;
    return !outcome.failure && request.copy && request.direction == Direction::recv;
  };
  // An abort waits for this lock. After it nothing may be written: the owner fails all operations, and their
  // tensors then belong to the caller.
  if (aborted_) std::erase_if(outcomes, is_spread);
  for (const auto& outcome : outcomes)
    if (is_spread(outcome))
      write_payload(*outcome.request, 0, outcome.request->descriptor.num_bytes,
                    outcome.request->data);
  lock.unlock();
  const auto settle = [&](bool failed) {
    for (const auto& [request, why] : outcomes)
      if ((why != nullptr) == failed) Operation::settle(*request, why);
  };
  settle(false);
  // A peer's failure explains the messages that can no longer match: the owner fails all operations
  // for that cause, including one that is being posted now.
  if (is_news) events_.on_remote_failure(*failure);
  if (!failure) settle(true);
  for (const auto& message : control) events_.on_control(link.peer(), message);
  if (num_outcomes == 0) return;
  num_pending_ -= num_outcomes;
  nudge();
  if (options_.on_settled) options_.on_settled();
}

void TcpTransport::nudge() {
  if (waiter_sleeps_) ring(waiter_bell_);  // its operation may be done
}

// With the peer's lock held.
void TcpTransport::write(Peer& peer) {
  Connection& connection = peer.connection;
  if (peer.is_over() || !connection.attached()) return;
  connection.write();
  const bool wants_out = connection.has_unsent();
  if (peer.wants_out == wants_out) return;
  const uint32_t out = wants_out ? static_cast<uint32_t>(EPOLLOUT) : 0u;
  if (try_watch(sockets_, EPOLL_CTL_MOD, connection.socket(), EPOLLIN | EPOLLRDHUP | out,
                static_cast<uint32_t>(connection.link().peer())))
    peer.wants_out = wants_out;
}

}  // namespace pipecomm::tcp
