// The connection to one peer: writes the packets of the PeerLink to the socket, passes arriving
// packets to it, and moves bodies between the socket and the memory of their requests without a
// copy.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "transport/tcp/peer_link.h"
#include "transport/tcp/socket.h"

namespace pipecomm::tcp {

// The peer has closed the socket, or it is broken.
class ConnectionLost : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A peer that reads never makes this rank queue so much: more than all windows, and answers.
inline constexpr size_t kMaxQueuedBytes = 128 << 20;

// Not thread-safe. Packets that are queued before there is a socket wait for it.
class Connection {
 public:
  Connection(int rank, int peer, uint32_t epoch, size_t max_queued_bytes = kMaxQueuedBytes);
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  PeerLink& link() { return link_; }
  const PeerLink& link() const { return link_; }

  // Unless `speaks_first`, nothing is sent before the peer has spoken: it may have abandoned this
  // connection, and the packets then wait for the next one.
  void attach(Socket socket, bool speaks_first);
  void detach();
  bool attached() const { return static_cast<bool>(socket_); }
  const Socket& socket() const { return socket_; }

  // Reads arrived data, within limits; returns whether there may be more. Throws ConnectionLost
  // after the last byte, std::runtime_error if the peer breaks the protocol.
  bool read();
  // Writes as much as possible without waiting. A broken socket is detected by read().
  void write();
  // Whether data wait for room in the socket.
  bool has_unsent() const {
    return is_free_ && (!packets_.empty() || !bodies_.empty() || piece_left_ > 0);
  }

  // For error texts, like "is connected".
  std::string describe() const;
  // Drops all unfinished requests and returns them; their memory is not used any more.
  std::vector<RequestPtr> drop();

 private:
  struct Body {
    RequestPtr send;
    int64_t num_taken = 0;
  };

  void take_in(size_t num_bytes);
  size_t begin_frame(std::span<const std::byte> bytes);
  void end_piece_if_in();
  void begin_piece();
  bool send_some();

  void push(std::vector<std::byte> packet);

  const uint32_t epoch_;
  const size_t max_queued_bytes_;
  PeerLink link_;
  Socket socket_;
  bool is_free_ = false;  // to send

  // Receiving: bytes that are not handled yet, and the place of the current piece.
  std::vector<std::byte> buffer_;
  size_t num_buffered_ = 0;
  int64_t piece_missing_ = 0;
  std::byte* piece_place_ = nullptr;  // null: its bytes are discarded
  wire::PieceHeader piece_header_;

  // Sending: whole packets, then the current piece, which nothing may interrupt, then bodies in
  // turns.
  std::deque<std::vector<std::byte>> packets_;
  size_t num_queued_bytes_ = 0;  // of them
  size_t packet_sent_ = 0;       // of the first one
  std::deque<Body> bodies_;
  size_t num_before_piece_ = 0;  // packets, its header the last of them
  const std::byte* piece_data_ = nullptr;
  int64_t piece_left_ = 0;
  RequestPtr piece_ends_;  // the request whose last piece it is
  std::vector<std::byte> stand_in_;
};

}  // namespace pipecomm::tcp
