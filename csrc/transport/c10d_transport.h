// Transport over a c10d backend with tagged point-to-point messages (gloo): portable, across hosts.
//
// Every pair of ranks shares one mailbox: small messages travel inside control packets, several per
// packet; a large one is announced in a packet while its body goes straight between the tensors
// under a tag that hashes the description of the message. Ends that disagree therefore never touch
// each other's memory; the announcement tells them why.
//
// Threads: one turns the mailbox (`progress`), one waits for bodies that no user thread is waiting
// for (`body_waiter`). gloo has neither polling nor a usable timeout, but aborting a Work frees its
// waiter without losing the message; that is how the progress thread is woken, and how waits are
// cut short. A one-byte receive per peer that is never answered (the sentinel) fails as soon as the
// connection closes, even in the middle of a message.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <array>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "transport/transport.h"
#include "transport/wire.h"

namespace pipecomm {

class C10dTransport final : public HostTransport {
 public:
  // The backend is ours alone: no other traffic runs on it, and its own timeout is out of reach.
  C10dTransport(c10::intrusive_ptr<c10d::Backend> backend, int rank, int size, uint32_t epoch,
                TransportEvents& events);
  ~C10dTransport() override;

  void post(std::vector<RequestPtr> batch) override;
  void assist(Operation& operation) override;
  void tick() override;
  void begin_close() override;
  void abort(const Failure& failure) override;
  void close(Deadline deadline) override;
  std::string describe_peer(int peer) const override;

 private:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  struct Packet {
    std::vector<std::byte> bytes;
    uint32_t number;
    WorkPtr work;
  };

  // The separate message of a payload that is too large for a packet.
  struct Body {
    RequestPtr request;
    WorkPtr work;  // destroyed before the request, and so before the memory it points to
    std::atomic<bool> claimed{false};  // somebody waits for `work`
    std::atomic<uint8_t> reached{0};   // receive side: kVerified | kArrived; done when both
  };
  using BodyPtr = std::shared_ptr<Body>;

  struct Arrival {  // a message record; `stored` holds the payload if it came before its receive
                    // was posted
    wire::RecordHeader header;
    Descriptor descriptor;
    std::span<const std::byte> payload;
    std::vector<std::byte> stored;
  };

  struct Channel {
    std::deque<RequestPtr> posted;   // receives without a record
    std::deque<Arrival> unexpected;  // records without a receive
    uint64_t next_arrival = 0;
    std::map<uint64_t, RequestPtr>
        unanswered;  // sends that the peer has not accepted or rejected yet
  };

  enum class PeerState : uint8_t { open, closing, lost };

  struct Peer {
    std::atomic<PeerState> state{PeerState::open};
    std::array<Channel, kNumChannels> channels;
    wire::PacketWriter writer;
    std::deque<Packet> packets;      // sent, not confirmed
    std::deque<RequestPtr> backlog;  // sends that wait for the window to open
    uint32_t last_packet_sent = 0;
    uint32_t last_packet_received = 0;
    size_t num_unanswered = 0;
    size_t num_unanswered_bytes = 0;
    bool closing_said = false;
    bool goodbye_said = false;
    std::atomic<bool> goodbye_answered{false};
    // Watchdog thread only:
    std::array<std::byte, 1> sentinel_byte{};
    WorkPtr sentinel;
    int num_ticks_closed = 0;
  };

  // --- any thread ---
  void post_body(const RequestPtr& request);
  void wake();
  bool wait_for_body(Body& body);
  void body_arrived(const BodyPtr& body);
  void hand_to_waiter(BodyPtr body);

  // --- progress thread ---
  void progress();
  void turn_mailbox();
  void post_mailbox(int slot);
  void drain_submissions();
  void enqueue_send(const RequestPtr& request);
  void enqueue_recv(const RequestPtr& request);
  void pump_backlog(Peer& peer);
  void transmit(Peer& peer, const RequestPtr& request);
  void handle_packet(int source, std::span<const std::byte> packet);
  void handle_record(int source, const wire::Record& record);
  void match(const RequestPtr& request, const Arrival& arrival);
  void answered(int source, const wire::Record& record);
  void add_record(int peer, wire::Kind kind, int channel, uint64_t seq,
                  const Descriptor* descriptor, std::span<const std::byte> payload);
  void add_text(int peer, wire::Kind kind, int channel, uint64_t seq, std::string_view text);
  void flush(int peer);
  void flush_all();
  void say_what_is_due();
  void peer_gone(int peer, const std::string& why);
  void refuse_unexpected(Peer& peer, int peer_idx);
  void fail_requests_of(int peer);
  void drop_everything();

  // --- body waiter thread ---
  void wait_for_bodies();

  void cancel(const RequestPtr& request, FailurePtr failure);
  FailurePtr mismatch(const Request& request, const Descriptor& theirs) const;
  FailurePtr refusal(const Request& request, std::string_view reason) const;
  FailurePtr gone(const Request& request) const;

  c10::intrusive_ptr<c10d::Backend> backend_;
  const int rank_;
  const int size_;
  const uint32_t epoch_;
  TransportEvents& events_;
  std::vector<std::unique_ptr<Peer>> peers_;

  std::mutex submit_mutex_;
  std::vector<RequestPtr> submissions_;
  std::vector<RequestPtr> accepts_;  // bodies that arrived outside the progress thread
  std::vector<std::pair<int, std::string>>
      gone_;  // peers that failed outside the progress thread: rank, reason
  std::vector<std::array<std::array<uint64_t, kNumChannels>, 2>>
      next_seq_;  // [peer][direction][channel]
  std::optional<std::string> failure_to_tell_;
  std::atomic<bool> aborted_{false};
  std::atomic<bool> closing_{false};  // nothing more is posted here
  std::atomic<bool> disconnecting_{false};
  std::atomic<bool> stopping_{false};

  static constexpr int kNumMailboxSlots = 2;
  std::array<std::vector<std::byte>, kNumMailboxSlots> mailbox_;
  std::mutex mailbox_mutex_;
  std::array<WorkPtr, kNumMailboxSlots> mailbox_works_;
  int current_slot_ = 0;

  std::mutex waiting_mutex_;
  std::set<c10d::Work*> waiting_;  // works that some thread is blocked on

  std::mutex bodies_mutex_;
  std::condition_variable bodies_changed_;
  std::deque<BodyPtr> bodies_;

  std::mutex close_mutex_;
  std::condition_variable close_changed_;
  std::thread progress_thread_;
  std::thread body_thread_;
};

}  // namespace pipecomm
