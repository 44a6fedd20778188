#include "transport/tcp/peer_link.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "message/matching.h"

namespace pipecomm {
namespace {

// Limits of the unanswered messages of a channel: their number, and their payload inside packets.
// They bound the memory of records that wait for their receive.
constexpr size_t kWindowRecords = 4096;
constexpr int64_t kWindowBytes = 4 << 20;

// Whether the receiver answers the messages of a channel.
bool is_answered(int channel) { return channel != kControlChannel; }

constexpr uint64_t kGoodbyeSeq = UINT64_MAX;  // the `seq` of an accept that answers a goodbye

std::string_view as_text(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

}  // namespace

bool has_body(const Request& request) {
  return !request.refuses && request.descriptor.num_bytes > kMaxInlineBytes;
}

namespace {

// Bytes of the payload that are sent inside a packet.
int64_t inline_bytes(const Request& request) {
  if (request.refuses || has_body(request)) return 0;
  return request.descriptor.num_bytes;
}

// The same, as its receiver sees it.
int64_t counted_bytes(const wire::RecordHeader& header) {
  return header.kind == wire::Kind::refuse ? 0 : int64_t{header.num_payload_bytes};
}

}  // namespace

// ------------------------------------------------------------------------------------------------
// posting

void PeerLink::number(Request& request) {
  Channel& channel = channels_[request.descriptor.channel];
  request.descriptor.seq =
      request.direction == Direction::send ? channel.next_send++ : channel.next_recv++;
}

void PeerLink::post(const RequestPtr& request) {
  if (dropped_) return;
  Channel& channel = channels_[request->descriptor.channel];
  if (request->direction == Direction::send) {
    if (state_ == State::lost) return settle(request, gone(*request));
    channel.backlog.push_back(request);
    pump(channel);
  } else if (!channel.unexpected.empty()) {
    const Arrival arrival = std::move(channel.unexpected.front());
    channel.unexpected.pop_front();
    channel.unexpected_bytes -= counted_bytes(arrival.header);
    match({request}, arrival);
  } else if (state_ != State::open) {
    settle(request, gone(*request));
  } else {
    // A peer keeps at most kWindowRecords of these.
    const bool is_ready_said = has_body(*request) && channel.posted.size() < kWindowRecords;
    if (is_ready_said) say_ready(*request);
    channel.posted.push_back({request, is_ready_said});
  }
}

void PeerLink::pump(Channel& channel) {
  if (goodbye_said_) return;
  while (!channel.backlog.empty() && channel.unanswered.size() < kWindowRecords) {
    const RequestPtr request = channel.backlog.front();
    const int64_t num_bytes = inline_bytes(*request);
    if (channel.unanswered_bytes + num_bytes > kWindowBytes) return;
    if (is_answered(request->descriptor.channel)) channel.unanswered_bytes += num_bytes;
    channel.backlog.pop_front();
    transmit(request);
  }
}

void PeerLink::transmit(const RequestPtr& request) {
  const Descriptor& descriptor = request->descriptor;
  Channel& channel = channels_[descriptor.channel];
  if (is_answered(descriptor.channel))
    channel.unanswered.emplace_hint(channel.unanswered.end(), descriptor.seq, request);
  else
    settle(request, nullptr);
  channel.next_transmit = descriptor.seq + 1;
  const auto ready = channel.ready.extract(descriptor.seq);
  if (request->refuses) {
    add_text(wire::Kind::refuse, descriptor.channel, descriptor.seq, request->refusal);
  } else if (has_body(*request)) {
    add(wire::Kind::announce, descriptor.channel, descriptor.seq, &descriptor, {});
    if (ready && ready.mapped().agrees_with(descriptor)) depart(channel, request);
  } else {
    add(wire::Kind::data, descriptor.channel, descriptor.seq, &descriptor,
        {request->data, static_cast<size_t>(descriptor.num_bytes)});
  }
}

void PeerLink::depart(Channel& channel, const RequestPtr& request) {
  channel.unanswered.erase(request->descriptor.seq);
  channel.departing.emplace(request->descriptor.seq, request);
  departing_.push_back(request);
}

void PeerLink::body_gone(const RequestPtr& request) {
  Channel& channel = channels_[request->descriptor.channel];
  if (channel.departing.erase(request->descriptor.seq) == 0) return;  // settled when the peer went
  settle(request, nullptr);
  pump(channel);
  send_closing();
}

std::span<std::byte> PeerLink::place_for(int channel_idx, uint64_t seq, uint32_t num_bytes) {
  if (dropped_) return {};
  Channel& channel = channels_[channel_idx];
  const auto found = channel.receiving.find(seq);
  if (found == channel.receiving.end())
    throw std::runtime_error("rank " + std::to_string(peer_) +
                             " sends a body that is not expected");
  auto& [request, num_arrived] = found->second;
  if (num_bytes == 0 || num_bytes > request->descriptor.num_bytes - num_arrived)
    throw std::runtime_error("rank " + std::to_string(peer_) +
                             " sends a body of another length than it has announced");
  if (num_arrived == 0) request->note_started();
  std::byte* const place = request->data + num_arrived;
  num_arrived += num_bytes;
  return {place, num_bytes};
}

void PeerLink::piece_arrived(int channel_idx, uint64_t seq) {
  Channel& channel = channels_[channel_idx];
  const auto found = channel.receiving.find(seq);
  if (found == channel.receiving.end()) return;  // dropped
  const auto& [request, num_arrived] = found->second;
  if (num_arrived < request->descriptor.num_bytes) return;
  settle(request, nullptr);
  channel.receiving.erase(found);
}

// ------------------------------------------------------------------------------------------------
// arriving

void PeerLink::handle_packet(std::span<const std::byte> packet) {
  const wire::PacketReader reader(packet, epoch_);
  const wire::PacketHeader& header = reader.header();
  if (header.packet_number != last_packet_received_ + 1)
    throw std::runtime_error("packet " + std::to_string(header.packet_number) + " from rank " +
                             std::to_string(peer_) + " came after packet " +
                             std::to_string(last_packet_received_));
  last_packet_received_ = header.packet_number;
  for (const wire::Record& record : reader.records()) handle_record(record);
}

void PeerLink::handle_record(const wire::Record& record) {
  switch (record.header.kind) {
    case wire::Kind::data:
    case wire::Kind::announce:
    case wire::Kind::refuse:
      return message_arrived(record);
    case wire::Kind::accept:
      if (record.header.seq == kGoodbyeSeq) {
        goodbye_answered_ = true;
        return;
      }
      return answered(record);
    case wire::Kind::reject:
    case wire::Kind::refused:
      return answered(record);
    case wire::Kind::ready:
      return peer_is_ready(record);
    case wire::Kind::failure:
      failure_ = decode_failure(record.payload);
      return;
    case wire::Kind::control:
      control_.emplace_back(record.payload.begin(), record.payload.end());
      return;
    case wire::Kind::closing:
      peer_closes_ = true;
      if (state_ == State::open) state_ = State::closing;
      for (Channel& channel : channels_)
        for (const RequestPtr& request : take_posted(channel)) settle(request, gone(*request));
      return;
    case wire::Kind::goodbye:
      if (std::exchange(goodbye_heard_, true))
        throw std::runtime_error("rank " + std::to_string(peer_) + " says goodbye twice");
      if (state_ != State::lost) state_ = State::disconnecting;
      add(wire::Kind::accept, 0, kGoodbyeSeq, nullptr, {});
      return;
  }
}

void PeerLink::message_arrived(const wire::Record& record) {
  if (dropped_) return;
  if (state_ != State::open)
    throw std::runtime_error("rank " + std::to_string(peer_) +
                             " sends a message after it has closed its communicator");
  Channel& channel = channels_[record.header.channel];
  if (record.header.seq != channel.next_arrival++)
    throw std::runtime_error("message " + std::to_string(record.header.seq) + " of rank " +
                             std::to_string(peer_) + " on channel " +
                             std::to_string(record.header.channel) + " came out of order");
  check_message(record, channel);
  Arrival arrival{record.header, record.descriptor, record.payload, {}};
  if (!channel.posted.empty()) {
    const Posted posted = std::move(channel.posted.front());
    channel.posted.pop_front();
    match(posted, arrival);
  } else if (closing_said_) {
    if (!is_answered(record.header.channel)) return;
    add_text(wire::Kind::refused, record.header.channel, record.header.seq,
             "it has closed its communicator");
  } else {
    arrival.stored.assign(record.payload.begin(), record.payload.end());
    arrival.payload = arrival.stored;
    channel.unexpected_bytes += counted_bytes(arrival.header);
    channel.unexpected.push_back(std::move(arrival));
  }
}

// Throws if the sender breaks the rules: the ends would use unbounded memory, or wait for a body
// that only one of them knows.
void PeerLink::check_message(const wire::Record& record, const Channel& channel) const {
  auto breaks = [&](const std::string& what) {
    throw std::runtime_error("rank " + std::to_string(peer_) + " " + what);
  };
  const int64_t num_bytes = record.descriptor.num_bytes;
  if (record.header.kind == wire::Kind::data && num_bytes > kMaxInlineBytes)
    breaks("sends " + bytes_text(num_bytes) + " inside a packet");
  if (record.header.kind == wire::Kind::announce && num_bytes <= kMaxInlineBytes)
    breaks("announces a message of only " + bytes_text(num_bytes));
  if (!is_answered(record.header.channel) && record.header.kind != wire::Kind::data)
    breaks("sends more than data on the control channel");
  if (channel.unexpected.size() >= kWindowRecords ||
      channel.unexpected_bytes + counted_bytes(record.header) > kWindowBytes)
    breaks("sends more than may wait for its receives");
}

void PeerLink::match(const Posted& posted, const Arrival& arrival) {
  const RequestPtr& request = posted.request;
  const int channel_idx = arrival.header.channel;
  const uint64_t seq = arrival.header.seq;
  Channel& channel = channels_[channel_idx];
  switch (meet(*request, arrival.header.kind == wire::Kind::refuse, arrival.descriptor)) {
    case Meeting::peer_refuses:
      add(wire::Kind::accept, channel_idx, seq, nullptr, {});
      return settle(request, request->refuses
                                 ? nullptr
                                 : refusal_failure(rank_, *request, as_text(arrival.payload)));
    case Meeting::self_refuses:
      add_text(wire::Kind::refused, channel_idx, seq, request->refusal);
      return settle(request, nullptr);
    case Meeting::disagree:
      if (is_answered(channel_idx))
        add(wire::Kind::reject, channel_idx, seq, &request->descriptor, {});
      return settle(request, mismatch_failure(rank_, *request, arrival.descriptor));
    case Meeting::agree:
      break;
  }
  if (arrival.header.kind != wire::Kind::announce) {
    if (!arrival.payload.empty())
      std::memcpy(request->data, arrival.payload.data(), arrival.payload.size());
    if (is_answered(channel_idx)) add(wire::Kind::accept, channel_idx, seq, nullptr, {});
    settle(request, nullptr);
  } else if (state_ == State::lost) {
    settle(request, gone(*request));
  } else {
    channel.receiving.emplace(seq, Receiving{request});
    if (!posted.is_ready_said) say_ready(*request);
  }
}

void PeerLink::say_ready(const Request& request) {
  const Descriptor& descriptor = request.descriptor;
  add(wire::Kind::ready, descriptor.channel, descriptor.seq, &descriptor, {});
}

// If the receive does not agree with the message, it gets the announcement later and rejects it.
void PeerLink::peer_is_ready(const wire::Record& record) {
  if (dropped_) return;
  Channel& channel = channels_[record.header.channel];
  const uint64_t seq = record.header.seq;
  if (seq >= channel.next_transmit) {
    if (channel.ready.size() >= kWindowRecords)
      throw std::runtime_error("rank " + std::to_string(peer_) +
                               " is ready for more messages than it may be");
    channel.ready.insert_or_assign(seq, record.descriptor);
    return;
  }
  const auto found = channel.unanswered.find(seq);
  if (found == channel.unanswered.end() || !has_body(*found->second) ||
      !record.descriptor.agrees_with(found->second->descriptor))
    return;
  const RequestPtr request = found->second;
  depart(channel, request);
  pump(channel);
  send_closing();
}

// The receiver's answer to one of our sends.
void PeerLink::answered(const wire::Record& record) {
  if (dropped_) return;
  Channel& channel = channels_[record.header.channel];
  const auto found = channel.unanswered.find(record.header.seq);
  if (found == channel.unanswered.end()) {
    throw std::runtime_error("rank " + std::to_string(peer_) +
                             " answers a message that was never sent");
  }
  const RequestPtr request = std::move(found->second);
  channel.unanswered.erase(found);
  channel.unanswered_bytes -= inline_bytes(*request);
  if (record.header.kind == wire::Kind::accept) {
    settle(request, nullptr);
  } else if (record.header.kind == wire::Kind::reject) {
    settle(request, mismatch_failure(rank_, *request, record.descriptor));
  } else {
    // A rank refuses point-to-point messages only when it closes.
    peer_closes_ |= request->descriptor.op == OpCode::p2p;
    settle(request, refused_send_failure(rank_, *request, record.text(), describe()));
  }
  pump(channel);
  send_closing();
}

// ------------------------------------------------------------------------------------------------
// sending

void PeerLink::add(wire::Kind kind, int channel, uint64_t seq, const Descriptor* descriptor,
                   std::span<const std::byte> payload) {
  if (state_ == State::lost) return;
  if (!writer_.add(kind, channel, seq, descriptor, payload)) {
    flush();
    writer_.add(kind, channel, seq, descriptor, payload);
  }
}

void PeerLink::add_text(wire::Kind kind, int channel, uint64_t seq, std::string_view text) {
  text = text.substr(0, wire::kMaxTextBytes);
  add(kind, channel, seq, nullptr, std::as_bytes(std::span(text.data(), text.size())));
}

void PeerLink::flush() {
  if (writer_.empty() || state_ == State::lost) return;
  send_packet_(writer_.take(epoch_, ++last_packet_sent_));
}

void PeerLink::greet() {
  flush();
  if (last_packet_sent_ == 0) send_packet_(writer_.take(epoch_, ++last_packet_sent_));
}

// ------------------------------------------------------------------------------------------------
// ending

void PeerLink::say_closing() {
  if (std::exchange(closing_said_, true)) return;
  send_closing();
  // A message without a receive by now will never get one.
  for (int channel_idx = 0; channel_idx < kNumChannels; ++channel_idx) {
    channels_[channel_idx].unexpected_bytes = 0;
    for (const Arrival& arrival : std::exchange(channels_[channel_idx].unexpected, {}))
      if (is_answered(channel_idx))
        add_text(wire::Kind::refused, channel_idx, arrival.header.seq,
                 "it has closed its communicator");
  }
}

// Sent after the last message, since the peer then fails every receive that is still unmatched.
void PeerLink::send_closing() {
  if (!closing_said_ || closing_sent_) return;
  for (const Channel& channel : channels_)
    if (!channel.backlog.empty()) return;
  closing_sent_ = true;
  add(wire::Kind::closing, 0, 0, nullptr, {});
}

void PeerLink::say_goodbye() {
  if (std::exchange(goodbye_said_, true)) return;
  add(wire::Kind::goodbye, 0, 0, nullptr, {});
}

void PeerLink::say_failure(const Failure& failure) {
  add(wire::Kind::failure, 0, 0, nullptr, encode_failure(failure));
}

void PeerLink::send_control(std::span<const std::byte> message) {
  add(wire::Kind::control, 0, 0, nullptr, message);
}

void PeerLink::leave() {
  goodbye_heard_ = true;
  state_ = State::disconnecting;
}

void PeerLink::lose() {
  if (std::exchange(state_, State::lost) == State::lost) return;
  for (Channel& channel : channels_)
    for (const RequestPtr& request : take_all(channel)) settle(request, gone(*request));
}

// Removes all posted receives and returns those that are still to be settled.
std::vector<RequestPtr> PeerLink::take_posted(Channel& channel) {
  std::vector<RequestPtr> pending;
  for (Posted& posted : channel.posted) pending.push_back(std::move(posted.request));
  channel.posted.clear();
  return pending;
}

// The same with all unfinished requests.
std::vector<RequestPtr> PeerLink::take_all(Channel& channel) {
  std::vector<RequestPtr> requests(channel.backlog.begin(), channel.backlog.end());
  channel.backlog.clear();
  for (RequestPtr& request : take_posted(channel)) requests.push_back(std::move(request));
  for (auto* const sends : {&channel.unanswered, &channel.departing})
    for (const auto& [seq, request] : std::exchange(*sends, {})) requests.push_back(request);
  for (const auto& [seq, receiving] : std::exchange(channel.receiving, {}))
    requests.push_back(receiving.request);
  return requests;
}

std::vector<RequestPtr> PeerLink::drop() {
  dropped_ = true;
  std::vector<RequestPtr> requests;
  for (Channel& channel : channels_) {
    for (RequestPtr& request : take_all(channel)) requests.push_back(std::move(request));
    channel.unexpected.clear();
  }
  departing_.clear();
  return requests;
}

void PeerLink::settle(const RequestPtr& request, FailurePtr failure) {
  outcomes_.push_back({request, std::move(failure)});
}

// ------------------------------------------------------------------------------------------------
// error texts

bool PeerLink::has_closed() const {
  if (state_ == State::open) return peer_closes_;
  return state_ != State::lost || goodbye_heard_;
}

std::string PeerLink::describe() const {
  if (has_closed()) return "has closed its communicator";
  return state_ == State::lost ? "died or was cut off" : "is connected";
}

FailurePtr PeerLink::gone(const Request& request) const {
  return gone_failure(rank_, request, describe());
}

}  // namespace pipecomm
