// The two ends of a lane: messages of one source and channel, in order. Not thread-safe: the
// transport calls them under its lock, and completes finished requests after releasing it. A payload
// that its receiver has granted is written in pieces, without the lock, by one or more threads.
#pragma once

#include <memory>
#include <utility>

#include "message/operation.h"
#include "message/queue.h"
#include "transport/shm/bell.h"
#include "transport/shm/multicast.h"
#include "transport/shm/ring.h"
#include "transport/shm/segment.h"
#include "transport/shm/window.h"

namespace pipecomm::shm {

struct Settlement {
  RequestPtr request;
  FailurePtr failure;
};
using Settlements = InlineVector<Settlement, 8>;

// State that all lanes of one rank share.
struct LaneContext {
  int rank = 0;
  uint32_t epoch = 0;
  WindowPool* window = nullptr;
  Settlements settled;

  void settle(RequestPtr request, FailurePtr failure = nullptr) {
    settled.push_back({std::move(request), std::move(failure)});
  }
};

class Outbound;

// Part of a payload for the receiver's window.
struct Piece {
  Outbound* lane;
  RequestPtr send;
  std::shared_ptr<const WindowWriter> writer;
  int64_t begin, end;

  void write() const { writer->write(*send, begin, end); }
};

// Payloads up to this size need no grant.
int64_t max_eager_bytes(int64_t ring_bytes);

class Outbound {
 public:
  // The lane `lane_idx` of this rank in the segment of `receiver`.
  Outbound(LaneContext& context, Segment& receiver, int lane_idx);

  void post(RequestPtr send);
  // Moves as much as it can without waiting, a few chunks at most. Throws std::runtime_error if the
  // other end breaks the protocol.
  bool advance();
  bool busy() const { return !unanswered_.empty(); }
  // Whether this rank should see soon what the receiver does.
  bool is_urgent() const {
    return num_answered_ < num_until_urgent_ || num_sent_ < unanswered_.size();
  }
  void wake_peer() { wake_deferred(bell_); }
  // Whether part of a granted payload is not being written yet, and the next piece of it.
  bool has_piece() const;
  Piece take_piece();
  void note_written() { --num_pieces_; }
  // Nothing more is posted.
  void finish() { lane_.num_final_sends.store(num_posted_ + 1); }
  // Only while no piece is being written.
  void drop();
  // Whether the receiver has posted its last receive before message `seq`.
  bool is_final_for_receiver(uint64_t seq) const;

 private:
  enum class Stage : uint8_t { header, grant, stream, direct };

  bool go_on();    // moves what it can
  bool give_up();  // fails all that is left
  bool take_answers();
  bool begin(const RequestPtr& send);
  bool take_grant(const Request& send);
  bool stream(const Request& send);
  bool say_landed(const Request& send);
  void put_record(RecordKind kind, const Request& send, uint32_t num_inline_bytes,
                  uint64_t multicast_position);
  void publish(uint64_t num_bytes);
  void next_message();
  void start_over();
  void settle(const RequestPtr& send, FailurePtr failure);
  FailurePtr verdict_on(const Request& send);

  LaneContext& context_;
  Segment& receiver_;
  Lane& lane_;
  Bell& bell_;
  RingWriter ring_;
  const int64_t max_eager_bytes_;
  const int64_t chunk_bytes_;
  Queue<RequestPtr> unanswered_;  // in order; the first `num_sent_` of them are sent
  size_t num_sent_ = 0;
  uint64_t num_posted_ = 0;
  uint64_t num_answered_ = 0;
  uint64_t num_until_urgent_ = 0;  // messages posted until the last one that is
  Stage stage_ = Stage::header;    // of the message after those
  int64_t offset_ = 0;             // payload written, or taken to be written
  int num_pieces_ = 0;             // taken, not written yet
  std::shared_ptr<const WindowWriter> window_writer_;
};

class Inbound {
 public:
  // The lane `lane_idx` of `sender` in this rank's own segment.
  Inbound(LaneContext& context, Segment& own, Segment& sender, int lane_idx);

  void post(RequestPtr recv);
  bool advance();  // as Outbound
  bool busy() const { return !posted_.empty(); }
  bool is_urgent() const { return num_answered_ < num_until_urgent_; }
  void wake_peer() { wake_deferred(bell_); }
  void finish() { lane_.num_final_recvs.store(num_posted_ + 1); }
  void drop() { posted_.clear(); }
  // The receive whose payload the sender may be writing into the window, or null.
  RequestPtr landing() const {
    return stage_ == Stage::landing && !is_over_ ? posted_.front() : nullptr;
  }

 private:
  enum class Stage : uint8_t { header, stream, landing, multicast };

  bool go_on();  // as in Outbound
  bool give_up();
  bool fail_final_receives();
  bool take_header();
  bool meet_message(const RecordHeader& header);
  bool stream();
  bool take_landed();
  bool take_multicast();
  RecordHeader read_header() const;
  void grant(const Request& recv);
  void skip_payload(const RecordHeader& header);
  void answer(FailurePtr failure);
  void leave_verdict(VerdictKind kind, const Request& recv);

  LaneContext& context_;
  Segment& sender_;
  Lane& lane_;
  Bell& bell_;
  RingReader ring_;
  MulticastReader multicast_;
  const int64_t max_eager_bytes_;
  const int64_t chunk_bytes_;
  Queue<RequestPtr> posted_;
  uint64_t num_posted_ = 0;
  uint64_t num_answered_ = 0;
  uint64_t num_until_urgent_ = 0;  // as in Outbound
  Stage stage_ = Stage::header;
  int64_t offset_ = 0;
  bool is_over_ = false;  // the sender has left, perhaps with half a message in the ring
};

}  // namespace pipecomm::shm
