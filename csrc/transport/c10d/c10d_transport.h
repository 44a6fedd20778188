// Transport over a c10d backend with tagged point-to-point messages (gloo): portable, across hosts.
//
// Each pair of ranks speaks the protocol of PeerLink. Packets are messages on one tag; a body is a
// message of its own whose tag hashes its description. Posting happens on the caller's thread. One
// thread per peer reads packets, and one more waits for bodies that no user thread is waiting for.
//
// gloo has neither polling nor a usable timeout, but aborting a Work frees its waiter without
// losing the message, so that is how waits are cut short. A pending receive fails as soon as the
// connection closes, even in the middle of another message: that is how the reader of a peer
// notices its death. Children of a dead process may hold its connections, so peers on this host are
// watched as well.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <array>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "transport/c10d/peer_link.h"
#include "transport/process_watch.h"
#include "transport/transport.h"

namespace pipecomm {

class C10dTransport final : public HostTransport {
 public:
  using Watches = std::map<int, std::unique_ptr<ProcessWatch>>;  // by rank

  // The backend is ours alone: no other traffic runs on it. Null for a group of one.
  C10dTransport(c10::intrusive_ptr<c10d::Backend> backend, int rank, int size, uint32_t epoch,
                TransportEvents& events, Watches watches = {});
  ~C10dTransport() override;

  void post(std::vector<RequestPtr> batch, bool is_async) override;
  void claim(int peer, Direction direction, const Descriptor& descriptor) override;
  bool assist(Operation& operation) override;
  void tick() override;
  void abort(const Failure& failure) override;
  void begin_close() override;
  void close(Deadline deadline) override;
  std::string describe_peer(int peer) const override;

 private:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  // The separate message of a payload that is too large for a packet. It is the transport_state of
  // its request, and so gone before the memory that it points to.
  struct Body {
    WorkPtr work;
    std::atomic<bool> claimed{false};  // a thread waits for `work`
  };

  struct Packet {
    uint64_t number;
    std::vector<std::byte> bytes;
    WorkPtr work;
  };

  static constexpr int kNumSlots = 2;  // packets that a peer can have under way to us
  static constexpr int kLastTicks = 10;

  struct Connection {
    std::mutex mutex;  // guards everything here but the bytes of the slots
    std::unique_ptr<PeerLink> link;
    std::deque<Packet> packets;  // sent, not confirmed by the peer
    std::array<std::vector<std::byte>, kNumSlots> slots;
    std::array<WorkPtr, kNumSlots> slot_works;
    // Requests that were under way when the communicator failed. If the buffer of a half-received
    // message goes away, gloo stops reading the connection for good and never notices its end.
    std::vector<RequestPtr> dropped;
    // Ticks until the reader of a peer whose process has ended stops reading: what it sent last is
    // in the socket. Time does not count, in which this process may have been stopped.
    int num_ticks_left = kLastTicks;
    std::atomic<bool> ended{false};
    std::unique_ptr<ProcessWatch> watch;  // if the peer is on this host; of the watchdog's thread
    std::thread reader;
  };

  template <class Function>
  void for_each_peer(Function function);
  void act(Connection& connection, std::unique_lock<std::mutex>& lock);

  void start_body(const RequestPtr& request);
  static Body* body_of(const Request& request);
  bool wait_for_body(const Request& request, Body& body);
  void body_through(const RequestPtr& request);
  void hand_to_body_thread(RequestPtr request);
  void wait_for_bodies();

  void send_packet(int peer, std::vector<std::byte> bytes, uint64_t number);
  void post_slot(int peer, int slot);
  void read_packets(int peer);
  void look_after(Connection& connection);
  void take_last_bodies(Connection& connection);
  void lost(int peer, const std::string& why);
  void stop();

  c10::intrusive_ptr<c10d::Backend> backend_;
  const int rank_;
  const int size_;
  TransportEvents& events_;
  std::vector<std::unique_ptr<Connection>> connections_;
  std::atomic<bool> aborted_{false};
  std::atomic<bool> disconnecting_{false};
  std::atomic<bool> stopping_{false};
  std::mutex starting_mutex_;  // held while threads are started

  std::mutex waiting_mutex_;
  std::set<c10d::Work*> waiting_;  // works of bodies that some thread is blocked on

  std::mutex bodies_mutex_;
  std::condition_variable bodies_changed_;
  std::deque<RequestPtr> bodies_;  // for the body thread
  std::thread body_thread_;

  std::mutex close_mutex_;
  std::condition_variable close_changed_;
  int num_open_ = 0;  // peers that have neither answered our goodbye nor disconnected
};

}  // namespace pipecomm
