#include "transport/c10d/c10d_transport.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <exception>
#include <system_error>

#include "message/message_copy.h"
#include "message/start_thread.h"
#include "transport/patience.h"

namespace pipecomm::tcp {
namespace {

// How long a thread that waits stays awake, which must be longer than it takes to wake another one
// (50 us or more on an idle virtual machine): else each end sleeps before the answer of the other,
// for as long as they talk. With more ranks than cores, ranks that have work need the core.
constexpr auto kSpinTime = std::chrono::microseconds(200);
// A waiting thread returns to the engine this often, which looks at deadlines and signals.
constexpr auto kAssistTime = std::chrono::milliseconds(50);
constexpr int kLastTicks = 10;
constexpr int kMaxEvents = 32;
constexpr uint32_t kBell = UINT32_MAX;  // in the place of a peer

Socket checked(int fd, int rank) {
  Socket socket(fd);
  if (!socket)
    throw PipeCommException(std::make_shared<Failure>(
        Failure{.message = "cannot make a queue of events: " + error_text(errno) +
                           "; raise the limit on descriptors (ulimit -n)",
                .rank = rank,
                .origin_rank = rank}));
  return socket;
}

// False if the kernel has no memory for it: the next tick tries again.
bool try_watch(const Socket& epoll, int operation, const Socket& socket, uint32_t events,
               uint32_t tag) {
  epoll_event event{};
  event.events = events;
  event.data.u32 = tag;
  return epoll_ctl(epoll.fd(), operation, socket.fd(), &event) == 0;
}

void watch(const Socket& epoll, int operation, const Socket& socket, uint32_t events,
           uint32_t tag) {
  if (!try_watch(epoll, operation, socket, events, tag))
    throw std::system_error(errno, std::generic_category(), "epoll_ctl");
}

// A payload that lies in several tensors goes through memory in between.
void make_contiguous(Request& request) {
  const int64_t num_bytes = request.descriptor.num_bytes;
  const std::shared_ptr<std::byte[]> memory(new std::byte[static_cast<size_t>(num_bytes)]);
  if (request.direction == Direction::send) read_payload(request, 0, num_bytes, memory.get());
  request.data = memory.get();
  request.transport_state = memory;
}

void ring(const Socket& bell) {
  const uint64_t one = 1;
  (void)!::write(bell.fd(), &one, sizeof one);  // fails only if it has been rung often
}

void silence(const Socket& bell) {
  uint64_t count;
  (void)!::read(bell.fd(), &count, sizeof count);
}

}  // namespace

C10dTransport::C10dTransport(C10dOptions options, std::vector<Socket> listeners,
                             TransportEvents& events)
    : options_(std::move(options)),
      num_cores_(num_usable_cores()),
      events_(events),
      peers_(static_cast<size_t>(options_.size)) {
  if (options_.size == 1) return;
  sockets_ = checked(epoll_create1(EPOLL_CLOEXEC), options_.rank);
  around_ = checked(epoll_create1(EPOLL_CLOEXEC), options_.rank);
  waiter_bell_ = checked(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), options_.rank);
  progress_bell_ = checked(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), options_.rank);
  watch(sockets_, EPOLL_CTL_ADD, waiter_bell_, EPOLLIN, kBell);
  watch(around_, EPOLL_CTL_ADD, progress_bell_, EPOLLIN, kBell);
  connector_ = std::make_unique<Connector>(
      options_.rank, options_.size, options_.key, options_.limits, std::move(listeners),
      checked(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), options_.rank),
      Connector::Events{
          [this](int peer, Socket socket, AttemptId attempt) {
            or_break([&] { connected(peer, std::move(socket), attempt); });
          },
          [this](int peer, const std::string& why) { or_break([&] { missed(peer, why); }); },
          [this](const std::string& why) { events_.on_broken(why); },
      });
  arm();
  progress_thread_ = start_thread([this] { progress(); }, options_.rank);
  try {
    connector_->start();
  } catch (...) {
    stopping_ = true;
    stop();
    throw;
  }
}

C10dTransport::~C10dTransport() { close(Clock::now()); }

// ------------------------------------------------------------------------------------------------
// peers

// Where nobody could catch what `action` throws: memory may be used up.
template <class Action>
void C10dTransport::or_break(Action action) {
  try {
    action();
  } catch (const std::exception& error) {
    events_.on_broken(error.what());
  }
}

template <class Function>
void C10dTransport::for_each_peer(Function function) {
  for (size_t idx = 0; idx < peers_.size(); ++idx)
    if (Peer* const peer = find(static_cast<int>(idx))) function(*peer);
}

C10dTransport::Peer& C10dTransport::peer_for(int peer_idx) {
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
  peers_[peer_idx].store(&peer, std::memory_order_release);
  if (const auto known = introductions_.find(peer_idx); known != introductions_.end())
    start_connecting_to(peer, known->second);
  else if (options_.on_wanted)
    options_.on_wanted(peer_idx);
  return peer;
}

// With `making_mutex_` held.
void C10dTransport::start_connecting_to(Peer& peer, const Introduction& introduction) {
  peer.pid = introduction.pid;
  connector_->connect(peer.connection.link().peer(), {introduction.hosts, introduction.port});
}

void C10dTransport::introduce(int peer_idx, const Introduction& introduction) {
  std::lock_guard lock(making_mutex_);
  if (!introductions_.emplace(peer_idx, introduction).second) return;
  num_local_ranks_ += introduction.is_on_this_host;
  if (Peer* const peer = find(peer_idx)) start_connecting_to(*peer, introduction);
}

// On the connector's thread.
void C10dTransport::connected(int peer_idx, Socket socket, AttemptId attempt) {
  if (options_.on_connected) options_.on_connected(peer_idx);
  Peer& peer = peer_for(peer_idx);
  std::unique_lock lock(peer.mutex);
  if (stopping_ || peer.is_over || peer.connection.link().has_met_peer()) return;
  detach(peer);  // from an older attempt, on which nothing has been said
  if (closing_) say_closing(peer);
  keep_alive(socket, options_.heartbeat, options_.heartbeat_limit);
  peer.num_ticks_left = kLastTicks;
  peer.attempt = attempt;
  peer.connection.attach(std::move(socket), attempt.is_own);
  try {
    watch(sockets_, EPOLL_CTL_ADD, peer.connection.socket(), EPOLLIN | EPOLLRDHUP,
          static_cast<uint32_t>(peer_idx));
  } catch (const std::system_error& error) {
    return lost(peer, lock, error.what());
  }
  write(peer);
  act(peer, lock);
}

// On the connector's thread.
void C10dTransport::missed(int peer_idx, const std::string& why) {
  Peer& peer = peer_for(peer_idx);
  std::unique_lock lock(peer.mutex);
  if (stopping_ || peer.is_over || peer.connection.attached()) return;
  miss(peer, lock, why);
}

// A forked child may hold the socket, too, and would keep it in the queue of events.
void C10dTransport::detach(Peer& peer) {
  if (peer.connection.attached())
    try_watch(sockets_, EPOLL_CTL_DEL, peer.connection.socket(), 0, 0);
  peer.wants_out = false;
  peer.connection.detach();
}

// With the peer's lock held, which is released. The connection has ended before the peer has spoken: it
// closed, or died, or it has given this attempt up and makes another one.
void C10dTransport::ended_unmet(Peer& peer, std::unique_lock<std::mutex>& lock,
                                const std::string& why) {
  if (peer.has_left) peer.connection.link().leave();
  if (disconnecting_ || peer.has_left) return lost(peer, lock, why);
  detach(peer);
  connector_->ended(peer.connection.link().peer(), peer.attempt, why);
  lock.unlock();
}

// With the peer's lock held, which is released. Ranks listen as long as their communicator is open.
void C10dTransport::miss(Peer& peer, std::unique_lock<std::mutex>& lock, const std::string& why) {
  if (disconnecting_) return lost(peer, lock, why);
  detach(peer);
  peer.watch.reset();
  lock.unlock();
  if (options_.on_missed) options_.on_missed(peer.connection.link().peer(), why);
}

void C10dTransport::note_gone(int peer_idx, bool has_closed, const std::string& why) {
  Peer& peer = peer_for(peer_idx);
  std::unique_lock lock(peer.mutex);
  if (stopping_ || peer.is_over) return;
  if (peer.connection.attached()) {
    peer.has_left = has_closed;  // what it may have said before is on its way
    return;
  }
  if (has_closed) peer.connection.link().leave();
  bool has_ended = false;
  try {
    has_ended = peer.pid != 0 && ProcessWatch(peer.pid).has_ended();
  } catch (const std::system_error&) {
    // Nothing is known of its process.
  }
  lost(peer, lock, has_ended ? "its process has ended" : why);
}

bool C10dTransport::has_met(int peer_idx) const {
  Peer* const peer = find(peer_idx);
  if (!peer) return false;
  std::lock_guard lock(peer->mutex);
  return peer->connection.link().has_met_peer();
}

void C10dTransport::note_closed(Peer& peer) {
  if (!std::exchange(peer.is_open, false)) return;
  {
    std::lock_guard close_lock(close_mutex_);
    --num_open_;
  }
  close_changed_.notify_all();
}

// With the peer's lock held, which is released, unless the peer was lost before.
void C10dTransport::lost(Peer& peer, std::unique_lock<std::mutex>& lock, const std::string& why) {
  if (std::exchange(peer.is_over, true)) return;
  PeerLink& link = peer.connection.link();
  // What it has said before explains its end.
  const bool orderly =
      disconnecting_ || link.state() == PeerLink::State::disconnecting || link.failure();
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

// Releases the lock, then does what the link has decided. User code may run here.
void C10dTransport::act(Peer& peer, std::unique_lock<std::mutex>& lock) {
  PeerLink& link = peer.connection.link();
  const auto outcomes = link.take_outcomes();
  const auto claims = link.take_claims();
  const std::optional<Failure> failure = link.failure();
  const bool is_news = failure && !std::exchange(peer.failure_told, true);
  lock.unlock();
  const auto settle = [&](bool failed) {
    for (const auto& [request, why] : outcomes) {
      if ((why != nullptr) != failed) continue;
      if (!failed && request->copy && request->direction == Direction::recv)
        write_payload(*request, 0, request->descriptor.num_bytes, request->data);
      Operation::settle(*request, why);
    }
  };
  settle(false);
  // A peer's failure explains the messages that can no longer match: the owner fails all operations
  // for that cause, also one that is being posted now.
  if (is_news) events_.on_remote_failure(*failure);
  if (!failure) settle(true);
  for (const PeerLink::Claim& claim : claims)
    events_.on_claim(link.peer(), claim.direction, claim.descriptor, claim.note);
  if (outcomes.empty()) return;
  num_pending_ -= static_cast<int64_t>(outcomes.size());
  nudge();
  if (options_.on_settled) options_.on_settled();
}

void C10dTransport::nudge() {
  if (waiter_sleeps_) ring(waiter_bell_);  // its operation may be done
}

// With the peer's lock held.
void C10dTransport::write(Peer& peer) {
  Connection& connection = peer.connection;
  if (peer.is_over || !connection.attached()) return;
  connection.write();
  const bool wants_out = connection.has_unsent();
  if (peer.wants_out == wants_out) return;
  const uint32_t out = wants_out ? static_cast<uint32_t>(EPOLLOUT) : 0u;
  if (try_watch(sockets_, EPOLL_CTL_MOD, connection.socket(), EPOLLIN | EPOLLRDHUP | out,
                static_cast<uint32_t>(connection.link().peer())))
    peer.wants_out = wants_out;
}

// ------------------------------------------------------------------------------------------------
// callers

void C10dTransport::post(std::vector<RequestPtr> batch, bool is_async) {
  if (aborted_) return;
  num_pending_ += static_cast<int64_t>(batch.size());
  std::vector<Peer*> touched;
  for (const RequestPtr& request : batch) {
    if (request->copy) make_contiguous(*request);
    Peer& peer = peer_for(request->peer);
    std::lock_guard lock(peer.mutex);
    if (aborted_) return;  // what was posted before is among the dropped
    peer.connection.link().number(*request);
    peer.connection.link().post(request);
    if (std::find(touched.rbegin(), touched.rend(), &peer) == touched.rend())
      touched.push_back(&peer);
  }
  for (Peer* const peer : touched) {
    std::unique_lock lock(peer->mutex);
    write(*peer);
    act(*peer, lock);
  }
  if (is_async) arm();
}

void C10dTransport::claim(int peer_idx, Direction direction, const Descriptor& descriptor,
                          std::span<const std::byte> note) {
  if (aborted_) return;
  Peer& peer = peer_for(peer_idx);
  std::unique_lock lock(peer.mutex);
  peer.connection.link().say_claim(direction, descriptor, note);
  write(peer);
  act(peer, lock);
}

void C10dTransport::connect(int peer_idx) {
  if (!aborted_ && options_.size > 1) peer_for(peer_idx);
}

bool C10dTransport::assist(Operation& operation) {
  std::unique_lock role(assist_mutex_, std::try_to_lock);
  if (!role || options_.size == 1) return true;
  disarm();
  const auto begin = Clock::now();
  Patience patience(num_cores_ >= num_local_ranks_ ? kSpinTime : Clock::duration::zero(), 0);
  while (!operation.done() && !aborted_ && !stopping_) {
    const auto passed = Clock::now() - begin;
    if (passed >= kAssistTime) break;
    if (patience.lasts()) {
      if (serve_events(0)) patience.renew();
      continue;
    }
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(kAssistTime - passed);
    waiter_sleeps_ = true;
    serve_events(operation.done() ? 1 : static_cast<int>(left.count()));
    patience.renew();
  }
  {
    std::lock_guard lock(arming_mutex_);
    is_assisted_ = false;
  }
  if (num_pending_ > 0) arm();
  return operation.done() || aborted_ || stopping_;
}

bool C10dTransport::has_closed(int peer_idx) const {
  Peer* const peer = find(peer_idx);
  if (!peer) return false;
  std::lock_guard lock(peer->mutex);
  return peer->connection.link().has_closed();
}

std::string C10dTransport::describe_peer(int peer_idx) const {
  Peer* const peer = find(peer_idx);
  if (!peer) return "is not connected";
  std::lock_guard lock(peer->mutex);
  if (peer->connection.attached() || peer->is_over) return peer->connection.describe();
  const std::string problem = connector_->problem(peer_idx);
  return "is not connected" + (problem.empty() ? "" : " (" + problem + ")");
}

// ------------------------------------------------------------------------------------------------
// serving the sockets

// Leaves the sockets to the progress thread, unless somebody assists.
void C10dTransport::arm() {
  std::lock_guard lock(arming_mutex_);
  if (is_armed_ || is_assisted_) return;
  is_armed_ = try_watch(around_, EPOLL_CTL_ADD, sockets_, EPOLLIN, 0);
}

// Takes them from it: it is not even woken.
void C10dTransport::disarm() {
  std::lock_guard lock(arming_mutex_);
  is_assisted_ = true;
  if (is_armed_) is_armed_ = !try_watch(around_, EPOLL_CTL_DEL, sockets_, 0, 0);
}

bool C10dTransport::serve_events(int timeout_ms) {
  std::array<epoll_event, kMaxEvents> events;
  const int num_events = epoll_wait(sockets_.fd(), events.data(), kMaxEvents, timeout_ms);
  if (timeout_ms != 0) waiter_sleeps_ = false;
  for (int idx = 0; idx < num_events; ++idx) {
    if (events[idx].data.u32 == kBell)
      silence(waiter_bell_);
    else
      or_break([&] { serve(static_cast<int>(events[idx].data.u32)); });
  }
  return num_events > 0;
}

void C10dTransport::serve(int peer_idx) {
  Peer& peer = *find(peer_idx);
  std::unique_lock lock(peer.mutex);
  if (peer.is_over || !peer.connection.attached()) return;
  peer.num_ticks_left = kLastTicks;
  const PeerLink& link = peer.connection.link();
  const bool had_met = link.has_met_peer();
  try {
    peer.connection.read();
  } catch (const ConnectionLost& error) {
    if (!link.has_met_peer()) return ended_unmet(peer, lock, error.what());
    return lost(peer, lock, error.what());
  } catch (const std::exception& error) {
    lock.unlock();
    events_.on_broken(error.what());
    lock.lock();
    return lost(peer, lock, error.what());
  }
  if (!had_met && link.has_met_peer()) connector_->spoke(peer_idx, peer.attempt);
  write(peer);
  if (link.goodbye_answered()) note_closed(peer);
  act(peer, lock);
}

void C10dTransport::progress() {
  while (!stopping_) {
    std::array<epoll_event, 2> events;
    const int num_events = epoll_wait(around_.fd(), events.data(), events.size(), -1);
    for (int idx = 0; idx < num_events; ++idx) {
      if (events[idx].data.u32 == kBell)
        silence(progress_bell_);
      else
        serve_events(0);
    }
  }
}

void C10dTransport::tick() {
  if (options_.size == 1 || stopping_) return;
  arm();  // in case a caller posted in order to wait, and then did not
  for_each_peer([this](Peer& peer) {
    std::unique_lock lock(peer.mutex, std::try_to_lock);
    if (!lock || stopping_) return;
    // In case its socket could not be watched for room.
    if (peer.connection.has_unsent() && !peer.wants_out) write(peer);
    look_after(peer, lock);
    if (lock) act(peer, lock);
  });
}

// Once its process is known: children of one that has ended may still hold its port.
void C10dTransport::watch_process(Peer& peer) {
  if (peer.is_watch_tried || peer.pid == 0) return;
  peer.is_watch_tried = true;
  peer.num_ticks_left = kLastTicks;
  try {
    peer.watch = std::make_unique<ProcessWatch>(peer.pid);
  } catch (const std::system_error&) {
    // No descriptor is left, or no pidfd is allowed: its connection has to tell.
  }
}

void C10dTransport::look_after(Peer& peer, std::unique_lock<std::mutex>& lock) {
  if (!peer.is_over) watch_process(peer);
  if (peer.is_over || !peer.watch || !peer.watch->has_ended() || --peer.num_ticks_left > 0) return;
  try {
    // The thread that serves the sockets may be busy with what came before.
    while (peer.connection.attached() && peer.connection.read()) {
    }
  } catch (const std::exception&) {
    // This was the last of it.
  }
  act(peer, lock);  // its last words count before its end
  lock.lock();
  if (peer.is_over) return;
  if (!peer.connection.link().has_met_peer()) return miss(peer, lock, "its process has ended");
  lost(peer, lock, "its process has ended");
}

// ------------------------------------------------------------------------------------------------
// end

void C10dTransport::abort(const Failure& failure) {
  {
    std::lock_guard lock(making_mutex_);
    if (failure_) return;
    failure_ = failure;
    aborted_ = true;
  }
  for_each_peer([&](Peer& peer) {
    std::vector<RequestPtr> dropped;  // ends without the lock
    std::lock_guard lock(peer.mutex);
    if (stopping_ || peer.is_over) return;
    peer.connection.link().say_failure(failure);
    peer.connection.link().flush();
    dropped = peer.connection.drop();
    write(peer);
  });
  if (options_.size > 1) ring(waiter_bell_);
}

void C10dTransport::say_closing(Peer& peer) {
  if (peer.is_routed || !options_.waits_for_routes) peer.connection.link().say_closing();
}

void C10dTransport::note_routed(int peer_idx) {
  Peer& peer = peer_for(peer_idx);
  std::unique_lock lock(peer.mutex);
  peer.is_routed = true;
  if (closing_) say_closing(peer);
  write(peer);
  act(peer, lock);
}

void C10dTransport::begin_close() {
  {
    std::lock_guard lock(making_mutex_);
    closing_ = true;
  }
  for_each_peer([this](Peer& peer) {
    std::unique_lock lock(peer.mutex);
    say_closing(peer);
    write(peer);
    act(peer, lock);
  });
}

void C10dTransport::begin_disconnect() {
  std::lock_guard lock(making_mutex_);  // later peers hear it when they are made
  disconnecting_ = true;
}

void C10dTransport::close(Deadline deadline) {
  if (options_.size == 1 || stopping_) return;
  begin_close();
  begin_disconnect();
  for_each_peer([this](Peer& peer) {
    std::unique_lock lock(peer.mutex);
    peer.connection.link().say_goodbye();
    write(peer);
    if (!peer.connection.attached()) note_closed(peer);  // it hears of the end by the directory
    act(peer, lock);
  });
  arm();
  {
    std::unique_lock lock(close_mutex_);
    close_changed_.wait_until(lock, deadline, [this] { return num_open_ == 0; });
  }
  aborted_ = stopping_ = true;
  stop();
}

// Ends the threads, then gives up what they have used.
void C10dTransport::stop() {
  connector_->stop();
  ring(progress_bell_);
  ring(waiter_bell_);
  if (progress_thread_.joinable()) progress_thread_.join();
  for_each_peer([this](Peer& peer) {
    // Threads that still wait, tick or abort see `stopping_` under this lock.
    std::vector<RequestPtr> dropped;
    std::lock_guard lock(peer.mutex);
    dropped = peer.connection.drop();
    peer.is_over = true;
    detach(peer);
    peer.watch.reset();
  });
}

}  // namespace pipecomm::tcp
