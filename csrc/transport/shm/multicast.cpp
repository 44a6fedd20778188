#include "transport/shm/multicast.h"

#include <algorithm>
#include <stdexcept>

#include "message/message_copy.h"

namespace pipecomm::shm {

MulticastWriter::MulticastWriter(Segment& own, IsGone is_gone)
    : multicast_(own.multicast()),
      memory_{own.multicast_ring(), static_cast<uint64_t>(own.shape().ring_bytes)},
      bells_(static_cast<size_t>(own.shape().size)),
      is_gone_(std::move(is_gone)) {}

void MulticastWriter::post(std::span<const RequestPtr> sends) {
  auto message = std::make_shared<MulticastMessage>();
  message->source = sends.front();
  message->position = end_;
  message->num_unsettled = static_cast<int>(sends.size());
  message->seqs.resize(bells_.size());
  for (const RequestPtr& send : sends) {
    message->seqs[send->peer] = send->descriptor.seq;
    send->transport_state = message;
  }
  end_ += record_span(static_cast<uint64_t>(sends.front()->descriptor.num_bytes));
  messages_.push_back(std::move(message));
}

bool MulticastWriter::advance() {
  if (messages_.empty()) return false;
  MulticastMessage& message = *messages_.front();
  const int64_t num_bytes = message.source->descriptor.num_bytes;
  const uint64_t end = message.position + record_span(static_cast<uint64_t>(num_bytes));
  if (message.num_unsettled == 0) {  // no rank reads the rest of it
    messages_.pop_front();
    publish(end);
    return true;
  }
  const int64_t chunk =
      std::min(chunk_bytes(static_cast<int64_t>(memory_.num_bytes)), num_bytes - message.offset);
  for (int reader = 0; reader < static_cast<int>(bells_.size()); ++reader) {
    if (!bells_[reader] || is_gone_(reader, message.seqs[reader])) continue;
    const uint64_t tail = multicast_.tail_of_rank[reader].value.load();
    if (is_before(head_, tail)) continue;  // this reader skips the message
    const uint64_t used = checked_distance(tail, head_, memory_.num_bytes);
    if (used + record_span(static_cast<uint64_t>(chunk)) > memory_.num_bytes) return false;
  }
  const auto to = memory_.piece(head_, static_cast<uint64_t>(chunk));
  const auto done = static_cast<int64_t>(to.size());
  read_payload(*message.source, message.offset, message.offset + done, to.data());
  message.offset += done;
  if (message.offset == num_bytes) {
    messages_.pop_front();
    publish(end);
  } else {
    publish(head_ + to.size());
  }
  return true;
}

void MulticastWriter::publish(uint64_t head) {
  multicast_.head.store(head_ = head);
  for (Bell* bell : bells_)
    if (bell) wake_unless_deferred(*bell);
}

MulticastReader::MulticastReader(Segment& source, int reader)
    : head_word_(source.multicast().head),
      tail_word_(source.multicast().tail_of_rank[reader].value),
      memory_{source.multicast_ring(), static_cast<uint64_t>(source.shape().ring_bytes)},
      bell_(source.status().bell) {}

void MulticastReader::check_position(uint64_t position) const {
  if (position != tail_)
    throw std::runtime_error("a multicast does not begin where the last one ended");
}

int64_t MulticastReader::read(const Request& recv, int64_t offset) {
  const int64_t num_bytes = recv.descriptor.num_bytes;
  const uint64_t head = head_word_.load();
  if (is_before(head, tail_)) return 0;  // the writer has not reached the end of a skipped message
  const uint64_t available = std::min(checked_distance(tail_, head, memory_.num_bytes),
                                      static_cast<uint64_t>(num_bytes - offset));
  if (available == 0) return 0;
  const auto from = memory_.piece(tail_, std::min<uint64_t>(available, kMaxChunkBytes));
  const auto done = static_cast<int64_t>(from.size());
  write_payload(recv, offset, offset + done, from.data());
  const bool is_last = offset + done == num_bytes;
  release(is_last ? record_span(static_cast<uint64_t>(num_bytes)) - static_cast<uint64_t>(offset)
                  : from.size());
  return done;
}

void MulticastReader::skip(int64_t num_bytes) {
  release(record_span(static_cast<uint64_t>(num_bytes)));
}

void MulticastReader::release(uint64_t num_bytes) {
  tail_word_.store(tail_ += num_bytes);
  wake_unless_deferred(bell_);
}

}  // namespace pipecomm::shm
