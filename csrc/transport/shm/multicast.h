// Payloads from one rank to all its peers: written once, read by every rank. There is no grant to wait
// for, and one copy per reader less than with separate sends: broadcasts of 64 KiB to 1 MiB are twice
// as fast (4 ranks).
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "message/operation.h"
#include "transport/shm/bell.h"
#include "transport/shm/ring.h"
#include "transport/shm/segment.h"

namespace pipecomm::shm {

// The state of a message on its way to all readers; each send request of it refers to this.
struct MulticastMessage {
  RequestPtr source;  // one of the requests: all have the same payload
  uint64_t position = 0;
  int64_t offset = 0;
  int num_unsettled = 0;       // requests; at 0 no reader needs the payload
  std::vector<uint64_t> seqs;  // of the message per reader
};

class MulticastWriter {
 public:
  // Whether the reader has posted its last receive before message `seq`.
  using IsGone = std::function<bool(int reader, uint64_t seq)>;
  MulticastWriter(Segment& own, IsGone is_gone);

  void add_reader(int rank, Bell& bell) { bells_[rank] = &bell; }
  // `sends`: one for each reader, posted by one call.
  void post(std::span<const RequestPtr> sends);
  bool advance();
  bool busy() const { return !messages_.empty(); }
  void drop() { messages_.clear(); }

 private:
  void publish(uint64_t head);

  Multicast& multicast_;
  const RingMemory memory_;
  std::vector<Bell*> bells_;  // of the readers, by rank; null: not one of them
  const IsGone is_gone_;
  uint64_t head_ = 0;
  uint64_t end_ = 0;  // of the last message posted
  std::deque<std::shared_ptr<MulticastMessage>> messages_;
};

// The ring of one writer as one reader sees it.
class MulticastReader {
 public:
  MulticastReader(Segment& source, int reader);

  // Throws std::runtime_error unless the next message begins at `position`.
  void check_position(uint64_t position) const;
  // Copies payload, starting at `offset`, to its place and returns the number of bytes.
  int64_t read(const Request& recv, int64_t offset);
  // Passes over a message instead of reading it, perhaps before it is written.
  void skip(int64_t num_bytes);

 private:
  void release(uint64_t num_bytes);

  const Counter& head_word_;
  Counter& tail_word_;
  const RingMemory memory_;
  Bell& bell_;
  uint64_t tail_ = 0;
};

}  // namespace pipecomm::shm
