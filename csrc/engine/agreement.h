// What the ranks of a collective tell each other before they run it for the first time, if its data
// travel by other means than the host transport. Each pair compares the descriptions of its
// messages, as the two ends of any message do. No rank may begin if any pair disagrees, so each
// rank also tells the others what it exchanges with whom, and looks for disagreements among them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/peer_messages.h"

namespace pipecomm {

class Agreement {
 public:
  // Of `rank` with the peers of `pairs`; others compare those in `fresh`, which are new to it.
  Agreement(int rank, int size, std::span<const PeerMessages> pairs,
            std::span<const PeerMessages> fresh);

  const std::vector<PeerMessages>& pairs() const { return pairs_; }
  // The note that goes to every peer, and the place for that of `peer`.
  std::span<std::byte> told() { return row(rank_); }
  std::span<std::byte> heard(int peer) { return row(peer); }

  struct Disagreement {
    int receiver;
    std::string text;  // "rank 0 sends 8 B to rank 1, which expects 12 B"
  };
  // Once all notes are there: of two ranks about messages that are new to both.
  std::optional<Disagreement> disagreement() const;

 private:
  static constexpr int64_t kNotCompared = -1;
  struct Entry {
    int64_t send_bytes = kNotCompared, recv_bytes = kNotCompared;
    uint64_t send_signature = 0, recv_signature = 0;
  };
  const Entry& at(int rank, int peer) const { return entries_[size_t(rank) * size_ + peer]; }
  std::span<std::byte> row(int rank) {
    return std::as_writable_bytes(std::span(entries_).subspan(size_t(rank) * size_, size_));
  }

  const int rank_;
  const int size_;
  const std::vector<PeerMessages> pairs_;
  std::vector<Entry> entries_;  // what each rank says of its messages with each peer
};

}  // namespace pipecomm
