#include "transport/shm/lane.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <string_view>

#include "message/matching.h"
#include "message/message_copy.h"

namespace pipecomm::shm {
namespace {

constexpr int64_t kMaxEagerBytes = 32 << 10;
constexpr int64_t kPieceBytes = 512 << 10;
constexpr int kMessagesPerTurn = 64;
constexpr const char* kClosed = "has closed its communicator";

RingMemory ring_memory(Segment& receiver, int source, int lane_idx) {
  return {receiver.ring(source, lane_idx), static_cast<uint64_t>(receiver.shape().ring_bytes)};
}

// What `peer` has written there when it closed: 0 before that, and 1 if it has never met this rank. Its
// goodbye, which it writes last, is read first.
uint64_t num_final(Segment& peer, const Counter& word) {
  const bool has_left = peer.status().goodbye.load() != 0;
  const uint64_t num = word.load();
  return num == 0 && has_left ? 1 : num;
}

// Large messages need both ranks while they move, and collectives continue when their messages arrive.
bool needs_both_ranks(const Request& request, int64_t max_eager_bytes) {
  const Descriptor& descriptor = request.descriptor;
  return descriptor.op != OpCode::p2p || descriptor.num_bytes > max_eager_bytes || request.refuses;
}

[[noreturn]] void broken(const Segment& peer, const char* what) {
  throw std::runtime_error("rank " + std::to_string(peer.rank()) + " sent " + what +
                           " through shared memory");
}

}  // namespace

int64_t max_eager_bytes(int64_t ring_bytes) { return std::min(kMaxEagerBytes, ring_bytes / 4); }

// ----------------------------------------------------------------------------------------------
// sending

Outbound::Outbound(LaneContext& context, Segment& receiver, int lane_idx)
    : context_(context),
      receiver_(receiver),
      lane_(receiver.lane(context.rank, lane_idx)),
      bell_(receiver.status().bell),
      ring_(lane_.head, lane_.tail, ring_memory(receiver, context.rank, lane_idx)),
      max_eager_bytes_(max_eager_bytes(receiver.shape().ring_bytes)),
      chunk_bytes_(chunk_bytes(receiver.shape().ring_bytes)) {}

void Outbound::post(RequestPtr send) {
  send->descriptor.seq = num_posted_++;
  if (needs_both_ranks(*send, max_eager_bytes_)) num_until_urgent_ = num_posted_;
  unanswered_.push_back(std::move(send));
}

bool Outbound::is_final_for_receiver(uint64_t seq) const {
  const uint64_t final_recvs = num_final(receiver_, lane_.num_final_recvs);
  return final_recvs != 0 && seq >= final_recvs - 1;
}

bool Outbound::advance() {
  if (go_on()) return true;
  // Its receiver does nothing after its goodbye, so what it has not answered by then, it never will.
  if (receiver_.status().goodbye.load() == 0) return false;
  return go_on() || give_up();
}

bool Outbound::go_on() {
  bool moved = take_answers();
  for (int num_turns = 0; num_turns < kMessagesPerTurn && num_sent_ < unanswered_.size();
       ++num_turns) {
    const RequestPtr& send = unanswered_[num_sent_];
    const size_t num_sent = num_sent_;
    const Stage stage = stage_;
    bool went_on = false;
    switch (stage) {
      case Stage::header:
        went_on = begin(send);
        break;
      case Stage::grant:
        went_on = take_grant(*send);
        break;
      case Stage::stream:
        went_on = stream(*send);
        break;
      case Stage::direct:
        went_on = say_landed(*send);
        break;
    }
    moved |= went_on;
    if (!went_on || (stage == Stage::stream && num_sent == num_sent_)) break;
  }
  return moved;
}

bool Outbound::give_up() {
  if (num_pieces_ > 0 || unanswered_.empty()) return false;
  for (size_t idx = 0; idx < unanswered_.size(); ++idx)
    settle(unanswered_[idx], gone_failure(context_.rank, *unanswered_[idx], kClosed));
  unanswered_.clear();
  num_sent_ = 0;
  start_over();
  return true;
}

bool Outbound::take_answers() {
  bool moved = false;
  const uint64_t num_answered = lane_.num_answered.load();
  const uint64_t num_begun = num_answered_ + num_sent_ + (stage_ == Stage::grant ? 1 : 0);
  if (num_answered < num_answered_ || num_answered > num_begun)
    broken(receiver_, "an answer to no message");
  for (; num_answered_ < num_answered; ++num_answered_) {
    if (num_sent_ == 0 && num_pieces_ > 0) return moved;  // a thread still reads the payload
    const RequestPtr send = std::move(unanswered_.front());
    unanswered_.pop_front();
    FailurePtr failure = verdict_on(*send);
    if (num_sent_ > 0) {
      --num_sent_;
    } else {
      if (!failure) broken(receiver_, "an answer to half a message");
      start_over();
    }
    settle(send, std::move(failure));
    moved = true;
  }
  while (!unanswered_.empty() && is_final_for_receiver(unanswered_.back()->descriptor.seq)) {
    if (num_sent_ + 1 == unanswered_.size() && num_pieces_ > 0) return moved;
    const RequestPtr send = std::move(unanswered_.back());
    unanswered_.pop_back();
    if (num_sent_ >= unanswered_.size()) {
      num_sent_ = unanswered_.size();
      start_over();
    }
    settle(send, gone_failure(context_.rank, *send, kClosed));
    moved = true;
  }
  return moved;
}

FailurePtr Outbound::verdict_on(const Request& send) {
  if (lane_.has_verdict.load() == 0) return nullptr;
  const Verdict verdict = lane_.verdict;
  if (verdict.seq != send.descriptor.seq) return nullptr;
  lane_.has_verdict.store(0);
  wake_sleepers(bell_);
  if (verdict.kind == VerdictKind::mismatch)
    return mismatch_failure(context_.rank, send, verdict.expected);
  const std::string_view text(verdict.text.data(),
                              std::min<size_t>(verdict.num_text_bytes, kMaxTextBytes));
  return refused_send_failure(context_.rank, send, text, kClosed);
}

void Outbound::settle(const RequestPtr& send, FailurePtr failure) {
  if (const auto message =
          std::static_pointer_cast<MulticastMessage>(std::move(send->transport_state)))
    --message->num_unsettled;
  context_.settle(send, std::move(failure));
}

void Outbound::drop() {
  for (size_t idx = 0; idx < unanswered_.size(); ++idx) unanswered_[idx]->transport_state.reset();
  unanswered_.clear();
  num_sent_ = 0;
  start_over();
}

bool Outbound::begin(const RequestPtr& send) {
  const int64_t num_bytes = send->descriptor.num_bytes;
  if (!send->refuses && num_bytes > max_eager_bytes_) {
    if (!ring_.has_space(sizeof(RecordHeader))) return false;
    if (const auto message = std::static_pointer_cast<MulticastMessage>(send->transport_state)) {
      put_record(RecordKind::multicast, *send, 0, message->position);
      next_message();
    } else {
      put_record(RecordKind::rendezvous, *send, 0, 0);
      stage_ = Stage::grant;
    }
    publish(sizeof(RecordHeader));
    return true;
  }
  const int64_t num_inline_bytes =
      send->refuses ? static_cast<int64_t>(std::min(send->refusal.size(), kMaxTextBytes))
                    : num_bytes;
  const uint64_t span = sizeof(RecordHeader) + record_span(static_cast<uint64_t>(num_inline_bytes));
  if (!ring_.has_space(span)) return false;
  put_record(send->refuses ? RecordKind::refusal : RecordKind::eager, *send,
             static_cast<uint32_t>(num_inline_bytes), 0);
  for (int64_t offset = 0; offset < num_inline_bytes;) {
    const auto to = ring_.piece(sizeof(RecordHeader) + static_cast<uint64_t>(offset),
                                static_cast<uint64_t>(num_inline_bytes - offset));
    const auto done = static_cast<int64_t>(to.size());
    if (send->refuses)
      std::memcpy(to.data(), send->refusal.data() + offset, to.size());
    else
      read_payload(*send, offset, offset + done, to.data());
    offset += done;
  }
  next_message();
  ring_.publish(span);
  if (send->refuses)
    wake_sleepers(bell_);
  else
    wake_unless_deferred(bell_);
  return true;
}

void Outbound::put_record(RecordKind kind, const Request& send, uint32_t num_inline_bytes,
                          uint64_t multicast_position) {
  RecordHeader header{};
  header.magic = kRecordMagic;
  header.kind = kind;
  header.epoch = context_.epoch;
  header.num_inline_bytes = num_inline_bytes;
  header.multicast_position = multicast_position;
  header.descriptor = send.descriptor;
  std::memcpy(ring_.piece(0, sizeof header).data(), &header, sizeof header);
}

void Outbound::publish(uint64_t num_bytes) {
  ring_.publish(num_bytes);
  wake_sleepers(bell_);
}

void Outbound::next_message() {
  ++num_sent_;
  start_over();
}

void Outbound::start_over() {
  stage_ = Stage::header;
  offset_ = 0;
  window_writer_.reset();
}

bool Outbound::take_grant(const Request& send) {
  if (lane_.num_granted.load() != send.descriptor.seq + 1) return false;
  const Grant grant = lane_.grant;
  send.note_started();
  if (grant.kind == GrantKind::stream) {
    stage_ = Stage::stream;
  } else if (grant.kind == GrantKind::direct) {
    window_writer_ =
        std::make_shared<const WindowWriter>(grant, receiver_, send.descriptor.num_bytes);
    stage_ = Stage::direct;
  } else {
    broken(receiver_, "an unknown grant");
  }
  return true;
}

bool Outbound::stream(const Request& send) {
  const int64_t num_bytes = send.descriptor.num_bytes;
  const auto chunk = static_cast<uint64_t>(std::min(chunk_bytes_, num_bytes - offset_));
  if (!ring_.has_space(record_span(chunk))) return false;
  const auto to = ring_.piece(0, chunk);
  const int64_t end = offset_ + static_cast<int64_t>(to.size());
  read_payload(send, offset_, end, to.data());
  if (end == num_bytes) {
    const uint64_t span = record_span(static_cast<uint64_t>(num_bytes - offset_));
    next_message();
    publish(span);
  } else {
    offset_ = end;
    publish(to.size());
  }
  return true;
}

bool Outbound::has_piece() const {
  return stage_ == Stage::direct && offset_ < unanswered_[num_sent_]->descriptor.num_bytes;
}

Piece Outbound::take_piece() {
  const RequestPtr& send = unanswered_[num_sent_];
  const int64_t begin = offset_;
  offset_ = std::min(begin + kPieceBytes, send->descriptor.num_bytes);
  ++num_pieces_;
  return {this, send, window_writer_, begin, offset_};
}

bool Outbound::say_landed(const Request& send) {
  if (offset_ < send.descriptor.num_bytes || num_pieces_ > 0) return false;
  if (!ring_.has_space(sizeof(RecordHeader))) return false;
  put_record(RecordKind::landed, send, 0, 0);
  next_message();
  publish(sizeof(RecordHeader));
  return true;
}

// ----------------------------------------------------------------------------------------------
// receiving

Inbound::Inbound(LaneContext& context, Segment& own, Segment& sender, int lane_idx)
    : context_(context),
      sender_(sender),
      lane_(own.lane(sender.rank(), lane_idx)),
      bell_(sender.status().bell),
      ring_(lane_.head, lane_.tail, ring_memory(own, sender.rank(), lane_idx)),
      multicast_(sender, context.rank),
      max_eager_bytes_(max_eager_bytes(own.shape().ring_bytes)),
      chunk_bytes_(chunk_bytes(own.shape().ring_bytes)) {}

void Inbound::post(RequestPtr recv) {
  recv->descriptor.seq = num_posted_++;
  if (needs_both_ranks(*recv, max_eager_bytes_)) num_until_urgent_ = num_posted_;
  posted_.push_back(std::move(recv));
}

bool Inbound::advance() {
  if (!is_over_ && go_on()) return true;
  // Nothing arrives after the sender's goodbye.
  if (sender_.status().goodbye.load() == 0) return false;
  return (!is_over_ && go_on()) || give_up();
}

bool Inbound::go_on() {
  bool moved = fail_final_receives();
  for (int num_turns = 0; num_turns < kMessagesPerTurn && !posted_.empty(); ++num_turns) {
    const uint64_t num_answered = num_answered_;
    const Stage stage = stage_;
    bool went_on = false;
    switch (stage) {
      case Stage::header:
        went_on = take_header();
        break;
      case Stage::stream:
        went_on = stream();
        break;
      case Stage::landing:
        went_on = take_landed();
        break;
      case Stage::multicast:
        went_on = take_multicast();
        break;
    }
    moved |= went_on;
    if (!went_on || (stage != Stage::header && num_answered == num_answered_)) break;
  }
  return moved;
}

bool Inbound::give_up() {
  if (posted_.empty()) return false;
  is_over_ = true;
  for (; !posted_.empty(); posted_.pop_front())
    context_.settle(posted_.front(), gone_failure(context_.rank, *posted_.front(), kClosed));
  return true;
}

bool Inbound::fail_final_receives() {
  const uint64_t final_sends = num_final(sender_, lane_.num_final_sends);
  if (final_sends == 0) return false;
  if (stage_ != Stage::header && num_answered_ >= final_sends - 1)
    broken(sender_, "its last message, and then another one");
  bool moved = false;
  while (!posted_.empty() && posted_.back()->descriptor.seq >= final_sends - 1) {
    const RequestPtr recv = std::move(posted_.back());
    posted_.pop_back();
    context_.settle(recv, gone_failure(context_.rank, *recv, kClosed));
    moved = true;
  }
  return moved;
}

RecordHeader Inbound::read_header() const {
  RecordHeader header;
  std::memcpy(&header, ring_.piece(0, sizeof header).data(), sizeof header);
  if (header.magic != kRecordMagic || header.epoch != context_.epoch)
    broken(sender_, "a malformed record");
  return header;
}

bool Inbound::take_header() {
  if (ring_.available(sizeof(RecordHeader)) < sizeof(RecordHeader)) return false;
  const RecordHeader header = read_header();
  const Descriptor& descriptor = header.descriptor;
  if (descriptor.seq != num_answered_) broken(sender_, "a message out of order");
  if (descriptor.num_bytes < 0) broken(sender_, "a message of negative size");
  switch (header.kind) {
    case RecordKind::eager:
      if (header.num_inline_bytes != static_cast<uint64_t>(descriptor.num_bytes) ||
          descriptor.num_bytes > max_eager_bytes_)
        broken(sender_, "a message of the wrong size");
      break;
    case RecordKind::refusal:
      if (header.num_inline_bytes > kMaxTextBytes) broken(sender_, "too long a refusal");
      break;
    case RecordKind::multicast:
      multicast_.check_position(header.multicast_position);
      [[fallthrough]];
    case RecordKind::rendezvous:
      if (header.num_inline_bytes != 0 || descriptor.num_bytes <= max_eager_bytes_)
        broken(sender_, "a message of the wrong size");
      break;
    default:
      broken(sender_, "an unknown record");
  }
  const uint64_t span = sizeof header + record_span(header.num_inline_bytes);
  if (ring_.available(span) < span) broken(sender_, "half a record");
  return meet_message(header);
}

bool Inbound::meet_message(const RecordHeader& header) {
  const Request& recv = *posted_.front();
  const bool refuses = header.kind == RecordKind::refusal;
  const Meeting meeting = meet(recv, refuses, header.descriptor);
  const bool leaves_verdict = meeting == Meeting::self_refuses || meeting == Meeting::disagree;
  if (leaves_verdict && lane_.has_verdict.load() != 0)
    return false;  // the sender has yet to read the last one

  std::string refusal;
  const bool takes_inline = refuses || (meeting == Meeting::agree && header.num_inline_bytes > 0);
  for (uint64_t offset = 0; takes_inline && offset < header.num_inline_bytes;) {
    const auto from = ring_.piece(sizeof header + offset, header.num_inline_bytes - offset);
    if (refuses)
      refusal.append(reinterpret_cast<const char*>(from.data()), from.size());
    else
      write_payload(recv, static_cast<int64_t>(offset), static_cast<int64_t>(offset + from.size()),
                    from.data());
    offset += from.size();
  }
  ring_.release(sizeof header + record_span(header.num_inline_bytes));

  FailurePtr failure;
  switch (meeting) {
    case Meeting::peer_refuses:
      if (!recv.refuses) failure = refusal_failure(context_.rank, recv, refusal);
      break;
    case Meeting::self_refuses:
      leave_verdict(VerdictKind::refused, recv);
      skip_payload(header);
      break;
    case Meeting::disagree:
      failure = mismatch_failure(context_.rank, recv, header.descriptor);
      leave_verdict(VerdictKind::mismatch, recv);
      skip_payload(header);
      break;
    case Meeting::agree:
      offset_ = 0;
      if (header.kind == RecordKind::rendezvous) {
        recv.note_started();
        grant(recv);
        return true;
      }
      if (header.kind == RecordKind::multicast) {
        recv.note_started();
        stage_ = Stage::multicast;
        return true;
      }
      break;
  }
  answer(std::move(failure));
  return true;
}

void Inbound::skip_payload(const RecordHeader& header) {
  if (header.kind == RecordKind::multicast) multicast_.skip(header.descriptor.num_bytes);
}

void Inbound::leave_verdict(VerdictKind kind, const Request& recv) {
  Verdict& verdict = lane_.verdict;
  verdict.kind = kind;
  verdict.seq = recv.descriptor.seq;
  verdict.expected = recv.descriptor;
  const size_t num_text_bytes = std::min(recv.refusal.size(), kMaxTextBytes);
  verdict.num_text_bytes = static_cast<uint32_t>(num_text_bytes);
  std::memcpy(verdict.text.data(), recv.refusal.data(), num_text_bytes);
  lane_.has_verdict.store(1, std::memory_order_release);
}

void Inbound::grant(const Request& recv) {
  const auto direct = context_.window ? context_.window->find(recv) : std::nullopt;
  lane_.grant = direct ? *direct : Grant{GrantKind::stream, 0, {}};
  lane_.num_granted.store(recv.descriptor.seq + 1);
  stage_ = direct ? Stage::landing : Stage::stream;
  wake_sleepers(bell_);
}

// Counts the first posted receive as answered.
void Inbound::answer(FailurePtr failure) {
  const RequestPtr recv = std::move(posted_.front());
  posted_.pop_front();
  stage_ = Stage::header;
  context_.settle(recv, std::move(failure));
  lane_.num_answered.store(++num_answered_);
  wake_unless_deferred(bell_);
}

bool Inbound::stream() {
  const Request& recv = *posted_.front();
  const int64_t num_bytes = recv.descriptor.num_bytes;
  const auto left = static_cast<uint64_t>(num_bytes - offset_);
  const uint64_t available = std::min(ring_.available(1), left);
  if (available == 0) return false;
  const auto from = ring_.piece(0, std::min(available, static_cast<uint64_t>(chunk_bytes_)));
  const int64_t end = offset_ + static_cast<int64_t>(from.size());
  write_payload(recv, offset_, end, from.data());
  if (end == num_bytes) {
    const uint64_t span = record_span(static_cast<uint64_t>(num_bytes - offset_));
    if (ring_.available(span) < span) broken(sender_, "half a record");
    ring_.release(span);
    answer(nullptr);  // wakes the sender
  } else {
    offset_ = end;
    ring_.release(from.size());
    wake_sleepers(bell_);
  }
  return true;
}

bool Inbound::take_landed() {
  if (ring_.available(sizeof(RecordHeader)) < sizeof(RecordHeader)) return false;
  if (read_header().kind != RecordKind::landed) broken(sender_, "an unexpected record");
  ring_.release(sizeof(RecordHeader));
  answer(nullptr);
  return true;
}

bool Inbound::take_multicast() {
  const Request& recv = *posted_.front();
  const int64_t done = multicast_.read(recv, offset_);
  if (done == 0) return false;
  offset_ += done;
  if (offset_ == recv.descriptor.num_bytes) answer(nullptr);
  return true;
}

}  // namespace pipecomm::shm
