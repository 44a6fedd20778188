#include "routes/routed_transport.h"

#include <algorithm>
#include <cerrno>
#include <exception>
#include <system_error>
#include <utility>

#include "message/matching.h"
#include "message/start_thread.h"
#include "transport/group_tree.h"

namespace pipecomm {
namespace {

constexpr const char* kHasClosed = "has closed its communicator";

}  // namespace

RoutedTransport::RoutedTransport(RoutedOptions options, TransportEvents& events)
    : rank_(options.rank),
      size_(options.size),
      events_(events),
      say_farewell_(std::move(options.say_farewell)),
      memory_(std::move(options.memory)),
      cores_(std::make_shared<SharedCores>(options.num_local_ranks)),
      connection_events_(events.connection_events()),
      routes_(static_cast<size_t>(options.size)),
      num_unknown_(memory_ ? options.size - 1 : 0) {
  if (size_ == 1) return;
  std::unique_lock lock(mutex_);  // reports of threads wait until construction is complete
  for (auto& route : routes_) route = memory_ ? RouteState::unwanted : RouteState::tcp;
  directory_ = std::make_unique<Directory>(
      rank_, std::move(options.lookup),
      Directory::Events{
          [this](int peer, const Introduction& introduction) {
            std::string obstacle;
            or_break(events_, [&] { obstacle = found(peer, introduction); });
            return obstacle;
          },
          [this](int peer, const std::optional<std::string>& farewell, const std::string& why) {
            or_break(events_, [&] { gone(peer, farewell, why); });
          },
      });
  try {
    if (!options.listeners.empty()) {
      options.tcp.cores = cores_;
      options.tcp.waits_for_routes = memory_ != nullptr;
      options.tcp.on_wanted = [this](int peer) { directory_->want(peer); };
      options.tcp.on_connected = [this](int peer) { connected(peer); };
      options.tcp.on_missed = [this](int peer, const std::string& why) {
        directory_->miss(peer, why);
      };
      options.tcp.on_settled = [this] {
        if (shm_) shm_->nudge();
      };
      tcp_ = std::make_unique<tcp::TcpTransport>(std::move(options.tcp),
                                                 std::move(options.listeners), events);
    }
    if (memory_) {
      shm::ShmOptions shm{.cores = cores_};
      shm.on_met = [this](int peer) { or_break(events_, [&] { met(peer); }); };
      shm.on_settled = [this] {
        if (tcp_) tcp_->nudge();
      };
      shm_ = std::make_unique<shm::ShmTransport>(memory_, std::move(shm), events);
    }
    directory_->start();
    for (const int peer : control_neighbours(rank_, size_)) {
      // One connection is enough; but both ends check whether they agree.
      if (peer > rank_ && !shm_)
        tcp_->connect(peer);
      else
        want(peer);
    }
  } catch (...) {
    lock.unlock();
    directory_->stop();
    throw;
  }
}

RoutedTransport::~RoutedTransport() { close(Clock::now()); }

// ------------------------------------------------------------------------------------------------
// making routes

void RoutedTransport::enter(int peer, RouteState state, const std::string& detail) {
  connection_events_->enter(routes_[peer], state, "route", peer, detail);
}

void RoutedTransport::want(int peer) {
  if (route_to(peer) == RouteState::unwanted) enter(peer, RouteState::wanted);
  directory_->want(peer);
}

void RoutedTransport::connect(int peer) {
  if (size_ == 1) return;
  if (!shm_) return tcp_->connect(peer);
  if (knows_way_to(peer)) return;
  std::lock_guard lock(mutex_);
  want(peer);
}

// On the directory's thread. Returns what keeps this rank from reaching the peer for now, or "".
std::string RoutedTransport::found(int peer, const Introduction& introduction) {
  if (!introduction.refusal.empty()) {
    if (std::lock_guard lock(mutex_); route_to(peer) < RouteState::refused)
      enter(peer, RouteState::refused, introduction.refusal);
    events_.on_refused(peer, introduction.refusal);
    if (tcp_) tcp_->introduce(peer, {});  // the peer cannot be reached
    return "";
  }
  if (introduction.farewell) {
    gone(peer, introduction.farewell, "");
    return "";
  }
  cores_->add(introduction.cores);
  if (tcp_) tcp_->introduce(peer, introduction);
  if (!shm_ || knows_way_to(peer)) return "";
  std::string obstacle;
  const auto way = map_memory(peer, introduction, obstacle);
  if (!way) return obstacle;  // or the peer counts as missed
  std::unique_lock lock(mutex_);
  if (*way == RouteState::shm && route_to(peer) < RouteState::met)
    enter(peer, RouteState::mapped);
  else
    settle(peer, *way, reasons_[peer], lock);
  return "";
}

// On the directory's thread. The peer is gone, and has never met this rank.
void RoutedTransport::gone(int peer, const std::optional<std::string>& farewell,
                           const std::string& why) {
  if (farewell && !farewell->empty())
    events_.on_remote_failure(decode_failure(std::as_bytes(std::span(*farewell))));
  if (tcp_)
    tcp_->note_gone(peer, farewell.has_value(), why);
  else if (!farewell)
    events_.on_peer_lost(peer, why);
  if (!shm_ || knows_way_to(peer)) return;
  std::unique_lock lock(mutex_);
  settle(peer, RouteState::gone, farewell ? kHasClosed : why, lock);
}

// Maps the memory of a peer; returns how messages travel, for shared memory once it has met us. While
// this rank has no file descriptor left, nothing is decided, and `obstacle` is set.
std::optional<RouteState> RoutedTransport::map_memory(int peer, const Introduction& introduction,
                                                      std::string& obstacle) {
  std::string reason = introduction.reason;
  if (introduction.memory_fd >= 0) {
    try {
      // The watch is made first: memory opened after it belongs to the watched process.
      auto watch = std::make_unique<ProcessWatch>(introduction.pid);
      if (!tcp_ && watch->has_ended()) {
        directory_->miss(peer, "its process has ended");
        return std::nullopt;
      }
      shm::SegmentShape shape = memory_->shape();
      shape.window_bytes = introduction.window_bytes;
      const shm::SegmentName name{introduction.pid, introduction.memory_fd,
                                  introduction.memory_inode};
      shm_->add_peer(shm::Segment::open(name, peer, shape), std::move(watch));
      return RouteState::shm;
    } catch (const std::system_error& error) {
      reason = error.what();
      const int code = error.code().value();
      if (!tcp_ && (code == EMFILE || code == ENFILE)) {
        obstacle = "has shared memory that this rank cannot open yet: " + reason;
        return std::nullopt;
      }
      const bool is_gone = code == ENOENT;
      if (!tcp_ && (is_gone || is_ending(introduction.pid))) {
        directory_->miss(peer, is_gone ? "its shared memory is gone" : "its process has ended");
        return std::nullopt;
      }
    } catch (const std::exception& error) {
      reason = error.what();
    }
  }
  {
    std::lock_guard lock(mutex_);
    reasons_[peer] = reason;
    if (!tcp_ && route_to(peer) < RouteState::refused) enter(peer, RouteState::refused, reason);
  }
  if (tcp_) return RouteState::tcp;
  events_.on_refused(peer,
                     "transport=\"shm\" is not possible: " + reason + "; use \"auto\" or \"tcp\"");
  return RouteState::gone;
}

// The peer has mapped this rank's memory, or has left.
void RoutedTransport::met(int peer) {
  std::unique_lock lock(mutex_);
  const RouteState route = route_to(peer);
  if (route == RouteState::mapped) return settle(peer, RouteState::shm, "", lock);
  if (route < RouteState::mapped) enter(peer, RouteState::met);
  if (!is_decided(route)) directory_->want(peer);
}

// The peer cannot map this rank's memory, or the two never considered shared memory.
void RoutedTransport::connected(int peer) {
  directory_->want(peer);
  if (!memory_) return;
  std::unique_lock lock(mutex_);
  settle(peer, RouteState::tcp, "the peer has connected", lock);
}

// Whether every peer that may look for this rank learns of its end without a farewell.
bool RoutedTransport::has_met_all() const {
  for (int peer = 0; peer < size_; ++peer) {
    const RouteState route = route_to(peer);
    if (peer != rank_ && (!is_decided(route) || (route == RouteState::tcp && !tcp_->has_met(peer))))
      return false;
  }
  return true;
}

// Without a farewell, peers that look for this rank assume that it has died. A separate thread writes it,
// since signals may interrupt the caller.
void RoutedTransport::say_farewell() {
  if (std::exchange(has_said_farewell_, true)) return;
  std::unique_lock lock(mutex_);
  auto say = [&, farewell = farewell_] {
    try {
      say_farewell_(farewell);
    } catch (const std::exception&) {
      // The store is gone.
    }
  };
  lock.unlock();
  try {
    start_thread(say, rank_).join();
  } catch (const PipeCommException&) {
    // No thread can be started.
  }
}

// Posts the messages that waited for the route, in order; later ones are then posted directly.
void RoutedTransport::settle(int peer, RouteState way, std::string why,
                             std::unique_lock<std::mutex>& lock) {
  if (route_to(peer) >= RouteState::settling) return;
  enter(peer, RouteState::settling);
  settling_[peer] = way;
  while (!waiting_[peer].empty()) {
    std::vector<RequestPtr> requests = std::exchange(waiting_[peer], {});
    lock.unlock();
    or_break(events_, [&] { post_by(way, requests, true); });  // the route is decided all the same
    lock.lock();
  }
  enter(peer, way, why);
  waiting_.erase(peer);
  settling_.erase(peer);
  if (way == RouteState::shm) ++num_shm_;
  if (way == RouteState::tcp) ++num_tcp_;
  const bool are_all_known = --num_unknown_ == 0;
  if (way == RouteState::shm) shm_->note_routed(peer);
  if (are_all_known && shm_) shm_->note_all_added();  // null if its constructor has failed
  lock.unlock();
  settled_.notify_all();
  if (way == RouteState::tcp) tcp_->note_routed(peer);
}

// How messages to the peer travel; one that waited may be done before all of them are posted.
RouteState RoutedTransport::way_to(int peer) const {
  std::lock_guard lock(mutex_);
  const auto settling = settling_.find(peer);
  return settling == settling_.end() ? route_to(peer) : settling->second;
}

Route RoutedTransport::route(int peer) const {
  if (size_ == 1) return {};
  const RouteState way = way_to(peer);
  if (way == RouteState::shm) return {"shm", ""};
  if (way != RouteState::tcp) return {};
  std::lock_guard lock(mutex_);
  const auto reason = reasons_.find(peer);
  return {"tcp", reason == reasons_.end() ? "" : reason->second};
}

// ------------------------------------------------------------------------------------------------
// callers

std::shared_ptr<std::byte> RoutedTransport::allocate_result(int64_t num_bytes) {
  return shm_ ? shm_->allocate_result(num_bytes) : nullptr;
}

void RoutedTransport::post(std::span<const RequestPtr> batch, bool is_async) {
  if (!shm_) return tcp_->post(batch, is_async);
  if (std::all_of(batch.begin(), batch.end(), [this](const RequestPtr& request) {
        return route_to(request->peer) == RouteState::shm;
      }))
    return shm_->post(batch, is_async);
  std::vector<RequestPtr> by_shm, by_tcp, to_nobody;
  for (const RequestPtr& request : batch) {
    RouteState way = route_to(request->peer);
    if (!is_decided(way)) {
      std::lock_guard lock(mutex_);
      way = route_to(request->peer);
      if (!is_decided(way)) {
        if (aborted_) continue;
        std::vector<RequestPtr>& waiting = waiting_[request->peer];
        if (waiting.empty()) want(request->peer);
        waiting.push_back(request);
        continue;
      }
    }
    (way == RouteState::shm   ? by_shm
     : way == RouteState::tcp ? by_tcp
                              : to_nobody)
        .push_back(request);
  }
  // A thread can help only with messages of one transport.
  is_async |= by_shm.size() < batch.size() && by_tcp.size() < batch.size();
  post_by(RouteState::shm, by_shm, is_async);
  post_by(RouteState::tcp, by_tcp, is_async);
  post_by(RouteState::gone, to_nobody, is_async);
}

void RoutedTransport::post_by(RouteState way, std::span<const RequestPtr> requests, bool is_async) {
  if (requests.empty()) return;
  if (way == RouteState::shm) return shm_->post(requests, is_async);
  if (way == RouteState::tcp) return tcp_->post(requests, is_async);
  {
    std::lock_guard lock(mutex_);
    if (aborted_) return;  // the owner fails them for that cause
  }
  for (const RequestPtr& request : requests)
    Operation::settle(*request, gone_failure(rank_, *request, kHasClosed));
}

void RoutedTransport::send_control(int peer, std::span<const std::byte> message) {
  if (!tcp_) return HostTransport::send_control(peer, message);
  tcp_->send_control(peer, message);
}

bool RoutedTransport::assist(Operation& operation) {
  if (size_ == 1) return true;
  if (!tcp_ || (shm_ && num_tcp_ == 0)) return shm_->assist(operation);
  if (!shm_ || num_shm_ == 0) return tcp_->assist(operation);
  bool has_shm = false, has_tcp = false;
  for (const RequestPtr& request : operation.requests()) {
    if (request->settled) continue;
    const RouteState way = route_to(request->peer);
    has_shm |= way == RouteState::shm;
    has_tcp |= way == RouteState::tcp;
  }
  // Another thread serves the transport that this one does not.
  if (has_tcp && !has_shm) {
    shm_->advance();
    return tcp_->assist(operation);
  }
  tcp_->arm();
  return shm_->assist(operation);
}

void RoutedTransport::advance() {
  if (shm_) shm_->advance();
}

bool RoutedTransport::has_closed(int peer) const {
  if (route_to(peer) == RouteState::gone) return true;
  return tcp_ && tcp_->has_closed(peer);
}

std::string RoutedTransport::describe_peer(int peer) const {
  const RouteState route = way_to(peer);
  // A peer that connects may be heard before its record is found.
  const bool has_met =
      route == RouteState::shm || (route == RouteState::tcp && tcp_->has_met(peer));
  if (const std::string problem = directory_->problem(peer); !has_met && !problem.empty())
    return problem;
  switch (route) {
    case RouteState::tcp:
      return tcp_->describe_peer(peer);
    case RouteState::gone:
      return kHasClosed;
    default:
      return shm_->describe_peer(peer);
  }
}

bool RoutedTransport::tick() {
  const bool again = tcp_ && tcp_->tick();
  return (shm_ && shm_->tick()) || again;
}

// ------------------------------------------------------------------------------------------------
// end

void RoutedTransport::abort(const Failure& failure) {
  std::vector<RequestPtr> dropped;  // end without the lock
  {
    std::lock_guard lock(mutex_);
    if (!std::exchange(aborted_, true)) {
      const std::vector<std::byte> record = encode_failure(failure);
      farewell_.assign(reinterpret_cast<const char*>(record.data()), record.size());
    }
    for (auto& [peer, requests] : waiting_)
      for (RequestPtr& request : std::exchange(requests, {})) dropped.push_back(std::move(request));
  }
  if (tcp_) tcp_->abort(failure);
  if (shm_) shm_->abort(failure);
}

void RoutedTransport::begin_close() {
  {
    // Messages that waited for a route are posted before this rank announces its end.
    std::unique_lock lock(mutex_);
    settled_.wait(lock, [this] {
      return std::none_of(routes_.begin(), routes_.end(),
                          [](const auto& route) { return route.load() == RouteState::settling; });
    });
  }
  if (tcp_) tcp_->begin_close();
  if (shm_) shm_->begin_close();
}

void RoutedTransport::close(Deadline deadline) {
  if (size_ == 1) return;
  begin_close();
  // A peer that reads the farewell rejects this rank's connections.
  if (tcp_) tcp_->begin_disconnect();
  directory_->begin_stop();  // a look-up in progress may take as long as the farewell
  const auto began_at = Clock::now();
  if (!has_met_all()) say_farewell();
  directory_->stop();
  deadline += Clock::now() - began_at;  // a silent store must not shorten the goodbye
  if (shm_) shm_->close(deadline);
  if (tcp_) tcp_->close(deadline);
}

}  // namespace pipecomm
