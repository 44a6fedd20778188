// The shared memory of a communicator: one segment per rank, mapped by the ranks that talk to it.
//
//   SegmentHeader                  magic, version, epoch, sizes: checked by each rank that maps it
//   Status                         of the owner, for all ranks: its bell, its failure, its goodbye
//   Lane[source][channel] + ring   messages source -> owner, each ring of `ring_bytes`
//   Multicast + ring               payloads owner -> all (broadcast): one writer, all ranks read
//   window                         results of the owner, which its peers write directly
//
// Every word except a bell's count and `num_met` has one writer: the owner, or the rank named below. Nothing
// is locked across ranks, so a rank may die at any instruction. Bytes that another rank has written
// are copied out, then checked.
//
// Messages. Per lane, in order, each record begins at a multiple of kRecordAlignBytes:
//   eager       header and payload are published together. The receiver copies them out or skips
//               them, then counts the message as answered.
//   rendezvous  header only. The receiver answers with a grant: `stream`, and the payload follows
//               in the ring, chunk by chunk; or `direct`, and the sender writes the payload into
//               parts of the receiver's window and then a `landed` record.
//   multicast   header only, with the position of the payload in the sender's multicast ring.
//   refusal     the text of why the sender takes no part.
// A receiver that disagrees or refuses leaves a verdict before it counts the message as answered,
// and no payload of a rendezvous is ever sent. A message that finds no posted receive stays in its
// ring and holds up its sender: memory is bounded, and no other channel waits for it.
//
// Meeting. A rank that needs a peer maps its segment and sets a flag there (`met`). Messages use shared
// memory once both have: a rank that cannot map the other one's segment never sets the flag, and connects
// over TCP instead, from which the other one learns of it.
//
// Ends. `num_final_*` is one more than the number of messages that a rank has posted when it
// closes: later ones can never match and fail on the other end. After its goodbye a rank reads and writes
// nothing, so whatever is then still in flight with it fails, too. The death of a process shows as a
// pidfd that becomes readable without a goodbye. A peer that says goodbye without having met this rank
// never had a message for it.
//
// Waking. A rank sleeps on `Bell::count`. It publishes in `sleepers` which of its threads to wake
// (a futex bitset), looks at everything once more, and sleeps unless the count has moved. A rank
// that changes something that another one may wait for stores first and then looks at `sleepers`.
// All four accesses are sequentially consistent, so either the sleeper sees the change or the other
// rank sees the sleeper. While a rank is awake its `sleepers` is 0, and its peers pay one load.
// A rank defers its progress (`kDeferred`) while none of its threads waits and it has posted only small
// messages, whose sends lie in their rings. Small messages and answers do not wake it then, but a peer
// does that is about to sleep until it answers. So most messages cost no system call, and do not interrupt
// the receiver's computation.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "message/descriptor.h"
#include "plan/strided_copy.h"
#include "transport/transport.h"

namespace pipecomm::shm {

inline constexpr uint64_t kSegmentMagic = 0x314d485350434950;  // "PIPCSHM1"
inline constexpr uint32_t kLayoutVersion = 4;
inline constexpr uint32_t kRecordMagic = 0x52435053;
inline constexpr size_t kPageBytes = 4096;
inline constexpr size_t kRecordAlignBytes = 128;
inline constexpr size_t kMaxTextBytes = 4096;     // of refusals
inline constexpr size_t kMaxFailureBytes = 8192;  // encoded
inline constexpr int64_t kMinRingBytes = 64 << 10;
inline constexpr int64_t kMaxRingBytes = int64_t{1} << 30;

using Word = std::atomic<uint32_t>;
using Counter = std::atomic<uint64_t>;
static_assert(Word::is_always_lock_free && Counter::is_always_lock_free);

struct SegmentHeader {
  uint64_t magic;
  uint32_t version;
  uint32_t epoch;
  uint32_t rank;
  uint32_t size;
  uint32_t num_lanes;  // per source
  uint32_t reserved;
  uint64_t ring_bytes;
  uint64_t window_bytes;
  uint64_t segment_bytes;

  bool operator==(const SegmentHeader&) const = default;
};

struct alignas(64) Bell {
  Word count;
  Word sleepers;
};

inline constexpr int kMaxRanks = 1024;

struct Status {
  Bell bell;
  // Who has mapped this segment: each rank sets its own word, then counts itself.
  alignas(64) Counter num_met;
  std::array<Word, kMaxRanks> met;
  alignas(64) Word failed;  // `failure` is valid
  Word goodbye;             // the owner has closed: the end of its process is no loss
  Word core;                // + 1, where a thread of the owner has last begun to wait; 0: unknown
  uint32_t num_failure_bytes;
  std::array<std::byte, kMaxFailureBytes> failure;
};

enum class GrantKind : uint32_t { stream = 1, direct = 2 };

// Consecutive bytes of the payload, and where they lie in the window of the receiver.
struct WindowPart {
  int64_t position_bytes;  // in the message
  int64_t offset_bytes;    // in the window
  StridedCopy copy;        // src strides are unused
};
inline constexpr size_t kMaxWindowParts = 8;

struct Grant {
  GrantKind kind;
  uint32_t num_parts;
  std::array<WindowPart, kMaxWindowParts> parts;
};

enum class VerdictKind : uint32_t { mismatch = 1, refused = 2 };

struct Verdict {
  VerdictKind kind;
  uint32_t num_text_bytes;
  uint64_t seq;
  Descriptor expected;
  std::array<char, kMaxTextBytes> text;
};

struct alignas(kPageBytes) Lane {
  // Written by the sender.
  alignas(64) Counter head;  // bytes ever put in the ring
  Counter num_final_sends;
  // Written by the receiver.
  alignas(64) Counter tail;  // bytes ever taken out
  Counter num_answered;      // messages
  Counter num_granted;       // sequence number + 1 of the message that `grant` is for
  Counter num_final_recvs;
  alignas(64) Grant grant;
  // Set by the receiver when `verdict` is valid, cleared by the sender when it has read it.
  alignas(64) Word has_verdict;
  Verdict verdict;
};

struct alignas(64) PaddedCounter {
  Counter value;
};

struct alignas(kPageBytes) Multicast {
  alignas(64) Counter head;                           // written by the owner
  std::array<PaddedCounter, kMaxRanks> tail_of_rank;  // written by that rank
};

enum class RecordKind : uint32_t {
  eager = 1,
  rendezvous = 2,
  multicast = 3,
  refusal = 4,
  landed = 5,
};

struct alignas(kRecordAlignBytes) RecordHeader {
  uint32_t magic;
  RecordKind kind;
  uint32_t epoch;
  uint32_t num_inline_bytes;  // the payload of an eager message, the text of a refusal
  uint64_t multicast_position;
  Descriptor descriptor;
};
static_assert(sizeof(RecordHeader) == kRecordAlignBytes);
static_assert(std::is_trivially_copyable_v<RecordHeader>);
static_assert(std::is_trivially_copyable_v<Grant> && std::is_trivially_copyable_v<Verdict>);

constexpr uint64_t record_span(uint64_t num_bytes) {
  return (num_bytes + kRecordAlignBytes - 1) / kRecordAlignBytes * kRecordAlignBytes;
}

}  // namespace pipecomm::shm
