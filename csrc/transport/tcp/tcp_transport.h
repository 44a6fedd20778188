// Transport over TCP between ranks of any hosts, which find each other through a c10d store.
//
// Each pair of ranks uses the protocol of PeerLink over one connection, which is made when one of
// them first needs it and knows where the other one listens. A rank has two threads, for any number
// of peers: one makes connections, and one serves them while no other thread waits. A thread that
// waits for an operation serves the sockets itself instead (assist), so that no message is passed
// between threads.
//
// A connection that ends without a goodbye means that the peer is lost. Children of a dead process
// may hold its connections, so processes of peers on this host are watched as well.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "transport/cores.h"
#include "transport/directory.h"
#include "transport/patience.h"
#include "transport/process_watch.h"
#include "transport/tcp/connection.h"
#include "transport/tcp/connector.h"
#include "transport/tcp/peer_state.h"
#include "transport/transport.h"

namespace pipecomm::tcp {

struct TcpOptions {
  int rank = 0;
  int size = 1;
  uint32_t epoch = 0;  // random, the same on all ranks
  Key key{};           // the same on all ranks, and secret
  ConnectorLimits limits{};
  std::shared_ptr<const SharedCores> cores;
  // Interval of keepalive probes to silent peers; time without a reply until a peer is lost.
  std::chrono::seconds heartbeat{10}, heartbeat_limit{60};
  // Whether messages may reach this transport later than they were posted, and after begin_close():
  // `closing` is then sent to a peer only after note_routed().
  bool waits_for_routes = false;
  // A peer is needed that has not been introduced yet.
  std::function<void(int peer)> on_wanted = nullptr;
  // A peer has connected to this rank, or this rank to it. Called again if that connection breaks
  // or the peer makes a newer one.
  std::function<void(int peer)> on_connected = nullptr;
  // A peer that this rank has never met cannot be found: note_gone() follows.
  std::function<void(int peer, const std::string& why)> on_missed = nullptr;
  // Requests have been settled, possibly by another thread than the one that waits for them.
  std::function<void()> on_settled = nullptr;
};

class TcpTransport final : public HostTransport {
 public:
  // `listeners`: none for a group of one.
  TcpTransport(TcpOptions options, std::vector<Socket> listeners, TransportEvents& events);
  ~TcpTransport() override;

  void post(std::span<const RequestPtr> batch, bool is_async) override;
  void send_control(int peer, std::span<const std::byte> message) override;
  void connect(int peer) override;
  // The addresses and the process of a peer: connections to it can be made from now on.
  void introduce(int peer, const Introduction& introduction);
  // A peer that never met this rank has closed its communicator, or has died without a farewell.
  void note_gone(int peer, bool has_closed, const std::string& why);
  // Whether the peer has spoken, and so will learn of the end of this rank.
  bool has_met(int peer) const;
  // All messages with the peer that waited for a route are posted; later ones come directly: see
  // TcpOptions::waits_for_routes.
  void note_routed(int peer);
  // Leaves the sockets to the progress thread, unless a thread assists.
  void arm();
  // Makes an assisting thread check whether its operation is done.
  void nudge();
  bool assist(Operation& operation) override;
  bool tick() override;
  void abort(const Failure& failure) override;
  void begin_close() override;
  // From now on the end of a connection is not a loss: close() follows, and peers may know that.
  void begin_disconnect();
  void close(Deadline deadline) override;
  bool has_closed(int peer) const override;
  std::string describe_peer(int peer) const override;

 private:
  struct Peer {
    Peer(int rank, int peer, uint32_t epoch) : connection(rank, peer, epoch) {}
    std::mutex mutex;  // guards everything here
    Connection connection;
    PeerState state = PeerState::unused;
    bool is_over() const { return state >= PeerState::closed; }
    AttemptId attempt;  // that made the connection
    bool is_routed = false;
    bool failure_told = false;
    bool wants_out = false;     // its socket is also watched for room
    bool is_open = true;        // has neither answered our goodbye nor left
    std::atomic<pid_t> pid{0};  // of its process, if it can be watched
    bool is_watch_tried = false;
    std::unique_ptr<ProcessWatch> watch;
    // Ticks without new data until an ended process counts as lost: its last data are in the
    // socket. Not a time limit, since this process may have been stopped meanwhile.
    int num_ticks_left = 0;
    static constexpr int kLastTicks = 10;
  };

  Peer* find(int peer) const { return peers_[peer].load(std::memory_order_acquire); }
  Peer& peer_for(int peer);
  template <class Function>
  void for_each_peer(Function function);

  void enter(Peer& peer, PeerState state, const std::string& detail = "");
  void start_connecting_to(Peer& peer, const Introduction& introduction);
  void connected(int peer_idx, Socket socket, AttemptId attempt);
  void missed(int peer_idx, const std::string& why);
  void detach(Peer& peer);
  void ended_unmet(Peer& peer, std::unique_lock<std::mutex>& lock, const std::string& why);
  void miss(Peer& peer, std::unique_lock<std::mutex>& lock, const std::string& why);
  void serve(int peer_idx);
  bool serve_events(int timeout_ms);
  void progress();
  void disarm();
  void act(Peer& peer, std::unique_lock<std::mutex>& lock);
  void write(Peer& peer);
  void note_closed(Peer& peer);
  void lost(Peer& peer, std::unique_lock<std::mutex>& lock, const std::string& why);
  void say_closing(Peer& peer);
  void watch_process(Peer& peer);
  bool look_after(Peer& peer, std::unique_lock<std::mutex>& lock);
  void stop();

  const TcpOptions options_;
  TransportEvents& events_;
  const std::shared_ptr<ConnectionEvents> connection_events_;
  std::vector<std::atomic<Peer*>> peers_;  // made when first needed
  std::mutex making_mutex_;                // down to the line
  std::vector<std::unique_ptr<Peer>> made_;
  std::optional<Failure> failure_;
  std::map<int, Introduction> introductions_;
  // ---

  // `sockets_`: all sockets and the waiter's bell. `around_`, for the progress thread: `sockets_`,
  // if it is armed, and its own bell.
  Socket sockets_, around_, waiter_bell_, progress_bell_;
  std::mutex assist_mutex_;  // held by the one thread that assists; down to the line
  SpinTime spin_time_;
  // ---
  std::mutex arming_mutex_;  // down to the line
  bool is_armed_ = false;
  bool is_assisted_ = false;
  // ---
  std::atomic<bool> waiter_sleeps_{false};
  std::atomic<int64_t> num_pending_{0};  // requests

  std::atomic<bool> aborted_{false};
  std::atomic<bool> closing_{false};
  std::atomic<bool> disconnecting_{false};
  std::atomic<bool> stopping_{false};

  std::mutex close_mutex_;
  std::condition_variable close_changed_;
  int num_open_ = 0;  // peers that are open

  std::unique_ptr<Connector> connector_;
  std::thread progress_thread_;
};

}  // namespace pipecomm::tcp
