// The transport of a communicator whose pairs of ranks may use different transports: shared memory if
// the two can map each other's, else TCP.
//
// A route is made when one of its two ends first needs it, or when the other end shows that it does;
// routes between neighbours (control_neighbours), which forward failures, are made in the background
// from the start. Messages posted earlier wait here; no thread waits for a peer. A rank uses shared
// memory once it has mapped the peer's and the peer has mapped its own; a rank that cannot map it
// connects over TCP instead, from which the other one learns of it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "routes/route_state.h"
#include "transport/directory.h"
#include "transport/shm/segment.h"
#include "transport/shm/shm_transport.h"
#include "transport/tcp/tcp_transport.h"
#include "transport/transport.h"

namespace pipecomm {

struct RoutedOptions {
  int rank = 0;
  int size = 1;
  int num_local_ranks = 1;  // of the whole job, on this host
  Directory::Lookup lookup;
  // Adds the farewell of this rank to its record, for peers that look it up afterwards. May throw, and
  // takes a second at most.
  std::function<void(const std::string& farewell)> say_farewell;
  // At least one of these two, if there is more than one rank.
  shm::SegmentPtr memory;              // null: no shared memory
  std::vector<tcp::Socket> listeners;  // none: no TCP
  tcp::TcpOptions tcp;
};

class RoutedTransport final : public HostTransport {
 public:
  RoutedTransport(RoutedOptions options, TransportEvents& events);
  ~RoutedTransport() override;

  bool copies_on_the_way() const override { return shm_ != nullptr; }
  std::shared_ptr<std::byte> allocate_result(int64_t num_bytes) override;
  void post(std::span<const RequestPtr> batch, bool is_async) override;
  void connect(int peer) override;
  void send_control(int peer, std::span<const std::byte> message) override;
  bool assist(Operation& operation) override;
  void advance() override;
  bool tick() override;
  void abort(const Failure& failure) override;
  void begin_close() override;
  void close(Deadline deadline) override;
  bool has_closed(int peer) const override;
  std::string describe_peer(int peer) const override;
  Route route(int peer) const override;

 private:
  RouteState way_to(int peer) const;
  RouteState route_to(int peer) const { return routes_[peer].load(std::memory_order_acquire); }
  bool knows_way_to(int peer) const { return is_decided(route_to(peer)); }
  // With the lock:
  void enter(int peer, RouteState state, const std::string& detail = "");
  void want(int peer);

  std::string found(int peer, const Introduction& introduction);
  void gone(int peer, const std::optional<std::string>& farewell, const std::string& why);
  std::optional<RouteState> map_memory(int peer, const Introduction& introduction,
                                       std::string& obstacle);
  void met(int peer);
  void connected(int peer);
  bool has_met_all() const;
  void say_farewell();
  void settle(int peer, RouteState way, std::string why, std::unique_lock<std::mutex>& lock);
  void post_by(RouteState way, std::span<const RequestPtr> requests, bool is_async);

  const int rank_, size_;
  TransportEvents& events_;
  const std::function<void(const std::string& farewell)> say_farewell_;
  const shm::SegmentPtr memory_;
  const std::shared_ptr<SharedCores> cores_;
  const std::shared_ptr<ConnectionEvents> connection_events_;
  std::vector<std::atomic<RouteState>> routes_;  // by rank; entered with the lock

  mutable std::mutex mutex_;                        // down to the line
  std::map<int, std::vector<RequestPtr>> waiting_;  // for their route
  std::map<int, RouteState> settling_;              // the ways to peers in that state
  std::condition_variable settled_;
  std::map<int, std::string> reasons_;  // why a peer shares no memory
  int num_unknown_ = 0;                 // peers whose way is not known
  bool aborted_ = false;
  std::string farewell_;            // for peers that have not met this rank
  bool has_said_farewell_ = false;  // of the thread that closes
  // ---

  std::atomic<int> num_shm_{0}, num_tcp_{0};  // routes
  std::unique_ptr<Directory> directory_;
  std::unique_ptr<shm::ShmTransport> shm_;
  std::unique_ptr<tcp::TcpTransport> tcp_;
};

}  // namespace pipecomm
