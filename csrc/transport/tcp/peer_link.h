// The message protocol between this rank and one peer: order, matching, agreement, flow control,
// goodbye. Pure logic over control packets: the transport carries the packets and the bodies, in
// order.
//
// A message of up to kMaxInlineBytes is one `data` record. A larger one is an `announce` record,
// and its body follows once the receiver has sent a `ready` record, which describes the message
// that it expects: when the receive is posted, or when the announcement meets it, whichever comes
// first. So a body goes directly to its place, and ends that disagree never touch each other's
// memory. The receiver answers every other message except those of the control channel: `accept`,
// `reject` with the expected descriptor, or `refused` with a reason. Records of one channel are
// matched with receives in order; one that comes before its receive is kept, and the sender limits
// how many there can be.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "message/operation.h"
#include "transport/tcp/wire.h"
#include "transport/transport.h"

namespace pipecomm {

inline constexpr int64_t kMaxInlineBytes = 32 << 10;

// Whether the payload is sent outside the packets.
bool has_body(const Request& request);

// Not thread-safe: the owner holds its lock around every call, and acts on the results of the
// take_...() calls after releasing it.
class PeerLink {
 public:
  using SendPacket = std::function<void(std::vector<std::byte> packet)>;
  PeerLink(int rank, int peer, uint32_t epoch, SendPacket send_packet)
      : rank_(rank), peer_(peer), epoch_(epoch), send_packet_(std::move(send_packet)) {}

  enum class State : uint8_t { open, closing, disconnecting, lost };

  struct Outcome {
    RequestPtr request;
    FailurePtr failure;
  };

  // Gives the request its place in the order; must precede post().
  void number(Request& request);
  void post(const RequestPtr& request);
  // The body of a send has left, for which its receiver was ready: the message is complete.
  void body_gone(const RequestPtr& request);
  // The place for the next `num_bytes` of the body of receive `seq`; empty if they are to be
  // discarded. Throws std::runtime_error if no such body is expected. piece_arrived() follows.
  std::span<std::byte> place_for(int channel, uint64_t seq, uint32_t num_bytes);
  void piece_arrived(int channel, uint64_t seq);
  // Throws std::runtime_error if the packet breaks the protocol.
  void handle_packet(std::span<const std::byte> packet);
  void flush();
  // Sends a packet even if it is empty: to the peer, this rank is unmet until its first packet.
  void greet();
  bool has_met_peer() const { return last_packet_received_ > 0; }

  void say_closing();
  void say_goodbye();
  void say_failure(const Failure& failure);
  // See HostTransport.
  void send_control(std::span<const std::byte> message);
  // The connection is lost: all unfinished requests fail.
  void lose();
  // The peer has left, or died, before it met this rank: later requests fail without a loss.
  void leave();
  // Drops all unfinished requests without settling them, and returns them.
  std::vector<RequestPtr> drop();

  int peer() const { return peer_; }
  State state() const { return state_; }
  bool goodbye_answered() const { return goodbye_answered_; }
  bool has_closed() const;  // the peer
  std::string describe() const;

  // The requests that the calls since the last take have settled.
  std::vector<Outcome> take_outcomes() { return std::exchange(outcomes_, {}); }
  // Sends whose receivers are ready for the bodies, which follow the packets that flush() sends.
  std::vector<RequestPtr> take_departing() { return std::exchange(departing_, {}); }
  std::vector<std::vector<std::byte>> take_control() { return std::exchange(control_, {}); }
  // Failure of the peer's communicator, once the peer has reported it.
  const std::optional<Failure>& failure() const { return failure_; }

 private:
  // A message record; `stored` holds the payload if it came before its receive was posted.
  struct Arrival {
    wire::RecordHeader header;
    Descriptor descriptor;
    std::span<const std::byte> payload;
    std::vector<std::byte> stored;
  };
  // A receive that waits for its record.
  struct Posted {
    RequestPtr request;
    bool is_ready_said = false;
  };
  struct Receiving {
    RequestPtr request;
    int64_t num_arrived = 0;
  };
  // Channels are independent, even if a receiver leaves messages on one of them unmatched.
  struct Channel {
    std::deque<RequestPtr> backlog;             // sends that wait for the window to open
    std::deque<Posted> posted;                  // receives without a record
    std::deque<Arrival> unexpected;             // records without a receive
    std::map<uint64_t, RequestPtr> unanswered;  // sends without an answer
    std::map<uint64_t, RequestPtr> departing;   // sends whose body is being sent
    std::map<uint64_t, Receiving> receiving;    // receives whose body is arriving
    std::map<uint64_t, Descriptor> ready;       // the peer's receives of bodies still to be sent
    int64_t unanswered_bytes = 0;               // of their payloads inside packets
    int64_t unexpected_bytes = 0;
    uint64_t next_send = 0;
    uint64_t next_transmit = 0;
    uint64_t next_recv = 0;
    uint64_t next_arrival = 0;
  };

  void pump(Channel& channel);
  void send_closing();
  void transmit(const RequestPtr& request);
  void handle_record(const wire::Record& record);
  void message_arrived(const wire::Record& record);
  void check_message(const wire::Record& record, const Channel& channel) const;
  void match(const Posted& posted, const Arrival& arrival);
  void say_ready(const Request& request);
  void peer_is_ready(const wire::Record& record);
  void depart(Channel& channel, const RequestPtr& request);
  void answered(const wire::Record& record);
  void settle(const RequestPtr& request, FailurePtr failure);
  static std::vector<RequestPtr> take_posted(Channel& channel);
  static std::vector<RequestPtr> take_all(Channel& channel);
  void add(wire::Kind kind, int channel, uint64_t seq, const Descriptor* descriptor,
           std::span<const std::byte> payload);
  void add_text(wire::Kind kind, int channel, uint64_t seq, std::string_view text);

  FailurePtr gone(const Request& request) const;

  const int rank_;
  const int peer_;
  const uint32_t epoch_;
  const SendPacket send_packet_;
  State state_ = State::open;
  std::array<Channel, kNumChannels> channels_;
  wire::PacketWriter writer_;
  uint64_t last_packet_sent_ = 0;
  uint64_t last_packet_received_ = 0;
  bool closing_said_ = false;  // by the owner
  bool closing_sent_ = false;  // to the peer, behind the last message
  bool peer_closes_ = false;   // it has sent `closing`, or a refusal implies it
  bool goodbye_said_ = false;
  bool goodbye_answered_ = false;
  bool goodbye_heard_ = false;
  bool dropped_ = false;
  std::vector<Outcome> outcomes_;
  std::vector<RequestPtr> departing_;
  std::vector<std::vector<std::byte>> control_;  // messages of the peer
  std::optional<Failure> failure_;
};

}  // namespace pipecomm
