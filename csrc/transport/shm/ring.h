// A byte ring with one writer and one reader, or one writer and several readers. Positions count
// bytes since the ring was created.
#pragma once

#include <algorithm>
#include <span>
#include <stdexcept>

#include "transport/shm/layout.h"

namespace pipecomm::shm {

// Of a payload that goes through a ring: the reader begins while the writer continues.
inline constexpr int64_t kMaxChunkBytes = 128 << 10;
inline int64_t chunk_bytes(int64_t ring_bytes) { return std::min(kMaxChunkBytes, ring_bytes / 4); }

struct RingMemory {
  std::byte* data = nullptr;
  uint64_t num_bytes = 0;

  // The bytes from `position` on that lie in one piece, at most `max_bytes`.
  std::span<std::byte> piece(uint64_t position, uint64_t max_bytes) const {
    const uint64_t offset = position % num_bytes;
    return {data + offset, std::min(max_bytes, num_bytes - offset)};
  }
};

inline bool is_before(uint64_t a, uint64_t b) { return static_cast<int64_t>(a - b) < 0; }

// Bytes between two positions of a ring, one of which another rank has written.
inline uint64_t checked_distance(uint64_t from, uint64_t to, uint64_t num_ring_bytes) {
  if (to - from > num_ring_bytes) throw std::runtime_error("a position lies outside its ring");
  return to - from;
}

class RingWriter {
 public:
  RingWriter(Counter& head, const Counter& tail, RingMemory memory)
      : head_word_(head), tail_word_(tail), memory_(memory) {}

  // Whether `num_bytes` can be written.
  bool has_space(uint64_t num_bytes) {
    if (memory_.num_bytes - (head_ - tail_) >= num_bytes) return true;
    const uint64_t tail = tail_word_.load();
    checked_distance(tail, head_, memory_.num_bytes);
    tail_ = tail;
    return memory_.num_bytes - (head_ - tail_) >= num_bytes;
  }
  // Where bytes go that begin `ahead` bytes after the last published one.
  std::span<std::byte> piece(uint64_t ahead, uint64_t max_bytes) const {
    return memory_.piece(head_ + ahead, max_bytes);
  }
  // The caller then wakes the reader.
  void publish(uint64_t num_bytes) { head_word_.store(head_ += num_bytes); }
  uint64_t head() const { return head_; }

 private:
  Counter& head_word_;
  const Counter& tail_word_;
  const RingMemory memory_;
  uint64_t head_ = 0;
  uint64_t tail_ = 0;  // as last seen
};

class RingReader {
 public:
  RingReader(const Counter& head, Counter& tail, RingMemory memory)
      : head_word_(head), tail_word_(tail), memory_(memory) {}

  // Bytes that can be read; at least `wanted` if that many are available.
  uint64_t available(uint64_t wanted) {
    if (head_ - tail_ < wanted) {
      const uint64_t head = head_word_.load();
      checked_distance(tail_, head, memory_.num_bytes);
      if (head % kRecordAlignBytes != 0) throw std::runtime_error("a position within a record");
      head_ = head;
    }
    return head_ - tail_;
  }
  std::span<const std::byte> piece(uint64_t ahead, uint64_t max_bytes) const {
    return memory_.piece(tail_ + ahead, max_bytes);
  }
  // The caller then wakes the writer.
  void release(uint64_t num_bytes) { tail_word_.store(tail_ += num_bytes); }
  uint64_t tail() const { return tail_; }

 private:
  const Counter& head_word_;
  Counter& tail_word_;
  const RingMemory memory_;
  uint64_t head_ = 0;  // as last seen
  uint64_t tail_ = 0;
};

}  // namespace pipecomm::shm
