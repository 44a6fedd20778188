#include "transport/tcp/tcp_transport.h"

#include <sys/eventfd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <exception>

#include "message/message_copy.h"
#include "message/start_thread.h"
#include "transport/tcp/events.h"

namespace pipecomm::tcp {
namespace {

// How long a waiting thread stays awake. It must be longer than waking another thread takes (50 us
// or more on an idle virtual machine): else each end sleeps before the other answers, in every
// round trip. With more ranks than cores, ranks that have work need the core.
constexpr auto kSpinTime = std::chrono::microseconds(200);
// A waiting thread returns to the engine this often, which checks deadlines and signals.
constexpr auto kAssistTime = std::chrono::milliseconds(50);
constexpr int kMaxEvents = 32;
constexpr uint32_t kBell = UINT32_MAX;  // instead of a peer's index

[[noreturn]] void throw_no_queue(int rank) {
  throw PipeCommException(
      Failure{.message = "cannot make a queue of events: " + error_text(errno) +
                         "; raise the limit on descriptors (ulimit -n), or on watched ones "
                         "(fs.epoll.max_user_watches)",
              .rank = rank,
              .origin_rank = rank});
}

Socket checked(int fd, int rank) {
  Socket socket(fd);
  if (!socket) throw_no_queue(rank);
  return socket;
}

void watch_bell(const Socket& epoll, const Socket& bell, int rank) {
  if (!try_watch(epoll, EPOLL_CTL_ADD, bell, EPOLLIN, kBell)) throw_no_queue(rank);
}

// Gives a payload that is spread over several tensors a contiguous buffer.
void make_contiguous(Request& request) {
  const int64_t num_bytes = request.descriptor.num_bytes;
  const std::shared_ptr<std::byte[]> memory(new std::byte[static_cast<size_t>(num_bytes)]);
  if (request.direction == Direction::send) read_payload(request, 0, num_bytes, memory.get());
  request.data = memory.get();
  request.transport_state = memory;
}

}  // namespace

TcpTransport::TcpTransport(TcpOptions options, std::vector<Socket> listeners,
                           TransportEvents& events)
    : options_(std::move(options)),
      events_(events),
      connection_events_(events.connection_events()),
      peers_(static_cast<size_t>(options_.size)),
      spin_time_(kSpinTime) {
  if (options_.size == 1) return;
  sockets_ = checked(epoll_create1(EPOLL_CLOEXEC), options_.rank);
  around_ = checked(epoll_create1(EPOLL_CLOEXEC), options_.rank);
  waiter_bell_ = checked(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), options_.rank);
  progress_bell_ = checked(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), options_.rank);
  watch_bell(sockets_, waiter_bell_, options_.rank);
  watch_bell(around_, progress_bell_, options_.rank);
  connector_ = std::make_unique<Connector>(
      options_.rank, options_.size, options_.key, options_.limits, std::move(listeners),
      checked(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), options_.rank),
      Connector::Events{
          [this](int peer, Socket socket, AttemptId attempt) {
            or_break(events_, [&] { connected(peer, std::move(socket), attempt); });
          },
          [this](int peer, const std::string& why) {
            or_break(events_, [&] { missed(peer, why); });
          },
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

TcpTransport::~TcpTransport() { close(Clock::now()); }

template <class Function>
void TcpTransport::for_each_peer(Function function) {
  for (size_t idx = 0; idx < peers_.size(); ++idx)
    if (Peer* const peer = find(static_cast<int>(idx))) function(*peer);
}

// ------------------------------------------------------------------------------------------------
// callers

void TcpTransport::post(std::span<const RequestPtr> batch, bool is_async) {
  if (aborted_) return;
  num_pending_ += static_cast<int64_t>(batch.size());
  std::vector<Peer*> touched;
  for (const RequestPtr& request : batch) {
    if (request->copy) make_contiguous(*request);
    Peer& peer = peer_for(request->peer);
    std::lock_guard lock(peer.mutex);
    if (aborted_) return;  // earlier requests are among the dropped ones
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

void TcpTransport::send_control(int peer_idx, std::span<const std::byte> message) {
  if (aborted_) return;
  Peer& peer = peer_for(peer_idx);
  std::unique_lock lock(peer.mutex);
  peer.connection.link().send_control(message);
  write(peer);
  act(peer, lock);
}

void TcpTransport::connect(int peer_idx) {
  if (!aborted_ && options_.size > 1) peer_for(peer_idx);
}

bool TcpTransport::assist(Operation& operation) {
  std::unique_lock role(assist_mutex_, std::try_to_lock);
  if (!role || options_.size == 1) return true;
  disarm();
  const auto begin = Clock::now();
  Patience patience(options_.cores->suffice() ? &spin_time_ : nullptr, 0);
  while (!operation.done() && !aborted_ && !stopping_) {
    const auto passed = Clock::now() - begin;
    if (passed >= kAssistTime) break;
    if (patience.lasts()) {
      if (serve_events(0)) patience.note_moved();
      continue;
    }
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(kAssistTime - passed);
    waiter_sleeps_ = true;
    serve_events(operation.done() ? 1 : static_cast<int>(left.count()));
    patience.note_slept();
  }
  {
    std::lock_guard lock(arming_mutex_);
    is_assisted_ = false;
  }
  if (num_pending_ > 0) arm();
  return operation.done() || aborted_ || stopping_;
}

bool TcpTransport::has_closed(int peer_idx) const {
  Peer* const peer = find(peer_idx);
  if (!peer) return false;
  std::lock_guard lock(peer->mutex);
  const PeerLink& link = peer->connection.link();
  return link.has_closed() && !link.failure();
}

std::string TcpTransport::describe_peer(int peer_idx) const {
  Peer* const peer = find(peer_idx);
  if (!peer) return "is not connected";
  std::lock_guard lock(peer->mutex);
  if (peer->connection.attached() || peer->is_over()) return peer->connection.describe();
  const std::string problem = connector_->problem(peer_idx);
  return "is not connected" + (problem.empty() ? "" : " (" + problem + ")");
}

// ------------------------------------------------------------------------------------------------
// serving the sockets

void TcpTransport::arm() {
  std::lock_guard lock(arming_mutex_);
  if (is_armed_ || is_assisted_) return;
  is_armed_ = try_watch(around_, EPOLL_CTL_ADD, sockets_, EPOLLIN, 0);
}

// Takes the sockets from the progress thread, which then is not woken.
void TcpTransport::disarm() {
  std::lock_guard lock(arming_mutex_);
  is_assisted_ = true;
  if (is_armed_) is_armed_ = !try_watch(around_, EPOLL_CTL_DEL, sockets_, 0, 0);
}

bool TcpTransport::serve_events(int timeout_ms) {
  std::array<epoll_event, kMaxEvents> events;
  const int num_events = epoll_wait(sockets_.fd(), events.data(), kMaxEvents, timeout_ms);
  if (timeout_ms != 0) waiter_sleeps_ = false;
  for (int idx = 0; idx < num_events; ++idx) {
    if (events[idx].data.u32 == kBell)
      silence(waiter_bell_);
    else
      or_break(events_, [&] { serve(static_cast<int>(events[idx].data.u32)); });
  }
  return num_events > 0;
}

void TcpTransport::serve(int peer_idx) {
  Peer& peer = *find(peer_idx);
  std::unique_lock lock(peer.mutex);
  if (peer.is_over() || !peer.connection.attached()) return;
  peer.num_ticks_left = Peer::kLastTicks;
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
  if (!had_met && link.has_met_peer()) {
    connector_->spoke(peer_idx, peer.attempt);
    if (peer.state == PeerState::attached) enter(peer, PeerState::connected);
  }
  if (link.state() != PeerLink::State::open && peer.state == PeerState::connected)
    enter(peer, PeerState::closing, link.describe());
  write(peer);
  if (link.goodbye_answered()) note_closed(peer);
  act(peer, lock);
}

void TcpTransport::progress() {
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

bool TcpTransport::tick() {
  if (options_.size == 1 || stopping_) return false;
  arm();  // in case a caller posted in order to wait, and then did not
  bool again = false;
  for_each_peer([&](Peer& peer) {
    std::unique_lock lock(peer.mutex, std::try_to_lock);
    if (!lock || stopping_) return;
    // In case its socket could not be watched for room to write.
    if (peer.connection.has_unsent() && !peer.wants_out) write(peer);
    again |= look_after(peer, lock);
    if (lock) act(peer, lock);
  });
  return again;
}

// Watches the peer's process once it is known, since children of an ended process may hold its
// connections.
void TcpTransport::watch_process(Peer& peer) {
  if (peer.is_watch_tried || peer.pid == 0) return;
  peer.is_watch_tried = true;
  peer.num_ticks_left = Peer::kLastTicks;
  try {
    peer.watch = std::make_unique<ProcessWatch>(peer.pid);
  } catch (const std::system_error&) {
    // No file descriptor is left, or pidfds are not allowed: only its connection shows its end.
  }
}

// Returns whether its process has ended and its connection has ticks left.
bool TcpTransport::look_after(Peer& peer, std::unique_lock<std::mutex>& lock) {
  if (!peer.is_over()) watch_process(peer);
  if (peer.is_over() || !peer.watch || !peer.watch->has_ended()) return false;
  if (--peer.num_ticks_left > 0) return true;
  try {
    // The thread that serves the sockets may still be busy with earlier data.
    while (peer.connection.attached() && peer.connection.read()) {
    }
  } catch (const std::exception&) {
    // All its data have been read.
  }
  act(peer, lock);  // its last packets count before its end
  lock.lock();
  if (peer.is_over()) return false;
  if (peer.connection.link().has_met_peer())
    lost(peer, lock, "its process has ended");
  else
    miss(peer, lock, "its process has ended");
  return false;
}

// ------------------------------------------------------------------------------------------------
// end

void TcpTransport::abort(const Failure& failure) {
  {
    std::lock_guard lock(making_mutex_);
    if (failure_) return;
    failure_ = failure;
    aborted_ = true;
  }
  for_each_peer([&](Peer& peer) {
    std::vector<RequestPtr> dropped;  // destroyed without the lock
    std::lock_guard lock(peer.mutex);
    if (stopping_ || peer.is_over()) return;
    peer.connection.link().say_failure(failure);
    peer.connection.link().flush();
    dropped = peer.connection.drop();
    write(peer);
  });
  if (options_.size > 1) ring(waiter_bell_);
}

void TcpTransport::say_closing(Peer& peer) {
  if (peer.is_routed || !options_.waits_for_routes) peer.connection.link().say_closing();
}

void TcpTransport::note_routed(int peer_idx) {
  Peer& peer = peer_for(peer_idx);
  std::unique_lock lock(peer.mutex);
  peer.is_routed = true;
  if (closing_) say_closing(peer);
  write(peer);
  act(peer, lock);
}

void TcpTransport::begin_close() {
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

void TcpTransport::begin_disconnect() {
  std::lock_guard lock(making_mutex_);  // later peers get it when they are made
  disconnecting_ = true;
}

void TcpTransport::close(Deadline deadline) {
  if (options_.size == 1 || stopping_) return;
  begin_close();
  begin_disconnect();
  for_each_peer([this](Peer& peer) {
    std::unique_lock lock(peer.mutex);
    peer.connection.link().say_goodbye();
    write(peer);
    if (!peer.connection.attached()) note_closed(peer);  // it learns of the end from the directory
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

// Ends the threads, then releases what they have used.
void TcpTransport::stop() {
  connector_->stop();
  ring(progress_bell_);
  ring(waiter_bell_);
  if (progress_thread_.joinable()) progress_thread_.join();
  for_each_peer([this](Peer& peer) {
    // Threads that still wait, tick or abort see `stopping_` under this lock.
    std::vector<RequestPtr> dropped;
    std::lock_guard lock(peer.mutex);
    dropped = peer.connection.drop();
    if (!peer.is_over()) enter(peer, PeerState::closed);
    detach(peer);
    peer.watch.reset();
  });
}

}  // namespace pipecomm::tcp
