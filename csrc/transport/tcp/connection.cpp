#include "transport/tcp/connection.h"

#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

namespace pipecomm::tcp {
namespace {

// Packets, which are more urgent, are sent between two pieces of a body.
constexpr int64_t kMaxPieceBytes = 1 << 20;
// Large bodies mostly bypass the buffer; their beginning or end may pass through it.
constexpr size_t kBufferBytes = 2 * wire::kMaxPacketBytes;
// Read from one peer, before others get their turn.
constexpr int64_t kMaxTurnBytes = 4 << 20;
constexpr size_t kMaxPacketsAtOnce = 16;

}  // namespace

Connection::Connection(int rank, int peer, uint32_t epoch, size_t max_queued_bytes)
    : epoch_(epoch),
      max_queued_bytes_(max_queued_bytes),
      link_(rank, peer, epoch, [this](std::vector<std::byte> packet) { push(std::move(packet)); }) {
}

void Connection::push(std::vector<std::byte> packet) {
  num_queued_bytes_ += packet.size();
  packets_.push_back(std::move(packet));
}

void Connection::attach(Socket socket, bool speaks_first) {
  socket_ = std::move(socket);
  buffer_.resize(kBufferBytes);
  num_buffered_ = 0;
  is_free_ = speaks_first;
  if (is_free_) link_.greet();
}

void Connection::detach() {
  // Closing a socket with unread bytes resets the connection, and the peer loses data in flight.
  if (socket_)
    while (recv(socket_.fd(), buffer_.data(), buffer_.size(), MSG_DONTWAIT) > 0) {
    }
  socket_ = {};
}

std::string Connection::describe() const {
  const bool is_cut = link_.state() == PeerLink::State::open && socket_ && is_unconfirmed(socket_);
  return link_.describe() +
         (is_cut
              ? ", but its host confirms nothing that is sent to it: it or the network may be down"
              : "");
}

// ------------------------------------------------------------------------------------------------
// receiving

bool Connection::read() {
  if (num_queued_bytes_ > max_queued_bytes_)
    throw std::runtime_error("rank " + std::to_string(link_.peer()) +
                             " sends, but does not read what is said to it");
  int64_t num_left = kMaxTurnBytes;
  while (num_left > 0) {
    std::array<iovec, 2> parts{};
    size_t num_parts = 0;
    // A piece is read directly only when the buffer is empty.
    if (piece_missing_ > 0 && piece_place_)
      parts[num_parts++] = {piece_place_, static_cast<size_t>(piece_missing_)};
    parts[num_parts++] = {buffer_.data() + num_buffered_, buffer_.size() - num_buffered_};
    msghdr message{};
    message.msg_iov = parts.data();
    message.msg_iovlen = num_parts;
    const ssize_t num_read = recvmsg(socket_.fd(), &message, MSG_DONTWAIT);
    if (num_read == 0) throw ConnectionLost("the connection was closed");
    if (num_read < 0) {
      if (errno == EINTR) continue;
      if (errno == EAGAIN || errno == EWOULDBLOCK) return false;
      throw ConnectionLost(error_text(errno));
    }
    num_left -= num_read;
    take_in(static_cast<size_t>(num_read));
    size_t asked_for = 0;
    for (size_t idx = 0; idx < num_parts; ++idx) asked_for += parts[idx].iov_len;
    if (static_cast<size_t>(num_read) < asked_for) return false;  // the socket is empty, or soon is
  }
  return true;
}

// Handles bytes that read() has just read into the piece and the buffer.
void Connection::take_in(size_t num_bytes) {
  if (piece_missing_ > 0 && piece_place_) {
    const size_t in_place = std::min(num_bytes, static_cast<size_t>(piece_missing_));
    piece_place_ += in_place;
    piece_missing_ -= static_cast<int64_t>(in_place);
    num_bytes -= in_place;
    end_piece_if_in();
  }
  num_buffered_ += num_bytes;
  size_t taken = 0;
  while (taken < num_buffered_) {
    const std::span<const std::byte> rest(buffer_.data() + taken, num_buffered_ - taken);
    if (piece_missing_ > 0) {
      const size_t count = std::min(rest.size(), static_cast<size_t>(piece_missing_));
      if (piece_place_) {
        std::memcpy(piece_place_, rest.data(), count);
        piece_place_ += count;
      }
      piece_missing_ -= static_cast<int64_t>(count);
      taken += count;
      end_piece_if_in();
      continue;
    }
    const size_t count = begin_frame(rest);
    if (count == 0) break;
    taken += count;
  }
  std::memmove(buffer_.data(), buffer_.data() + taken, num_buffered_ - taken);
  num_buffered_ -= taken;
}

// Returns the length of a whole packet, or of the header of a piece; 0 if it is not complete yet.
size_t Connection::begin_frame(std::span<const std::byte> bytes) {
  if (bytes.size() < wire::kFrameHeaderBytes) return 0;
  if (const auto piece = wire::piece_header(bytes, epoch_)) {
    piece_header_ = *piece;
    const std::span<std::byte> place =
        link_.place_for(static_cast<int>(piece->channel), piece->seq, piece->num_bytes);
    piece_place_ = place.data();
    piece_missing_ = piece->num_bytes;
    return sizeof *piece;
  }
  const size_t num_bytes = wire::packet_bytes(bytes, epoch_);
  if (bytes.size() < num_bytes) return 0;
  link_.handle_packet(bytes.first(num_bytes));
  if (!std::exchange(is_free_, true)) link_.greet();
  return num_bytes;
}

void Connection::end_piece_if_in() {
  if (piece_missing_ > 0) return;
  piece_place_ = nullptr;
  link_.piece_arrived(static_cast<int>(piece_header_.channel), piece_header_.seq);
}

// ------------------------------------------------------------------------------------------------
// sending

void Connection::write() {
  if (!attached() || !is_free_) return;
  int64_t num_left = kMaxTurnBytes;
  do {
    // An announcement precedes its body.
    link_.flush();
    for (RequestPtr& send : link_.take_departing()) bodies_.push_back({std::move(send)});
    if (piece_left_ == 0 && packets_.empty() && !bodies_.empty()) begin_piece();
    num_left -= kMaxPieceBytes;
  } while (has_unsent() && send_some() && num_left > 0);
}

// Queues the header of the next piece behind the packets that are already queued.
void Connection::begin_piece() {
  Body body = std::move(bodies_.front());
  bodies_.pop_front();
  const Descriptor& descriptor = body.send->descriptor;
  const int64_t num_bytes = std::min(kMaxPieceBytes, descriptor.num_bytes - body.num_taken);
  if (body.num_taken == 0) body.send->note_started();
  const wire::PieceHeader header{.channel = descriptor.channel,
                                 .epoch = epoch_,
                                 .num_bytes = static_cast<uint32_t>(num_bytes),
                                 .seq = descriptor.seq};
  std::vector<std::byte> bytes(sizeof header);
  std::memcpy(bytes.data(), &header, sizeof header);
  push(std::move(bytes));
  num_before_piece_ = packets_.size();
  piece_data_ = body.send->data + body.num_taken;
  piece_left_ = num_bytes;
  body.num_taken += num_bytes;
  if (body.num_taken == descriptor.num_bytes)
    piece_ends_ = std::move(body.send);
  else
    bodies_.push_back(std::move(body));
}

// False if the socket is full for now.
bool Connection::send_some() {
  std::array<iovec, kMaxPacketsAtOnce + 1> parts{};
  size_t num_parts = 0;
  size_t total = 0;
  auto add = [&](const std::byte* data, size_t num_bytes) {
    parts[num_parts++] = {const_cast<std::byte*>(data), num_bytes};
    total += num_bytes;
  };
  // While a piece is being sent, the packets before it are those that were queued when it began.
  const size_t num_packets = std::min(packets_.size(), kMaxPacketsAtOnce);
  const size_t num_before =
      piece_left_ > 0 ? std::min(num_packets, num_before_piece_) : num_packets;
  for (size_t idx = 0; idx < num_before; ++idx) {
    const size_t sent = idx == 0 ? packet_sent_ : 0;
    add(packets_[idx].data() + sent, packets_[idx].size() - sent);
  }
  if (piece_left_ > 0 && num_before == num_before_piece_)
    add(piece_data_, static_cast<size_t>(piece_left_));
  msghdr message{};
  message.msg_iov = parts.data();
  message.msg_iovlen = num_parts;
  const ssize_t num_sent = sendmsg(socket_.fd(), &message, MSG_DONTWAIT | MSG_NOSIGNAL);
  if (num_sent < 0) return errno == EINTR;
  size_t left = static_cast<size_t>(num_sent);
  for (size_t idx = 0; idx < num_before && left > 0; ++idx) {
    const size_t count = std::min(left, packets_.front().size() - packet_sent_);
    left -= count;
    packet_sent_ += count;
    if (packet_sent_ < packets_.front().size()) break;
    num_queued_bytes_ -= packets_.front().size();
    packets_.pop_front();
    packet_sent_ = 0;
    if (piece_left_ > 0) --num_before_piece_;
  }
  if (left > 0) {
    piece_data_ += left;
    piece_left_ -= static_cast<int64_t>(left);
    if (piece_left_ == 0 && piece_ends_) link_.body_gone(std::exchange(piece_ends_, nullptr));
  }
  return static_cast<size_t>(num_sent) == total;
}

std::vector<RequestPtr> Connection::drop() {
  bodies_.clear();
  piece_ends_ = nullptr;
  if (piece_left_ > 0) {  // the peer expects these bytes before any other packet
    stand_in_.assign(static_cast<size_t>(piece_left_), std::byte{0});
    piece_data_ = stand_in_.data();
  }
  piece_place_ = nullptr;
  return link_.drop();
}

}  // namespace pipecomm::tcp
