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
  // Of `rank` with the peers of `pairs`; others compare those in `fresh`, which are new to it. With
  // `notes`, on all ranks or none, the ranks that agree hear of those that do not.
  Agreement(int rank, int size, std::span<const PeerMessages> pairs,
            std::span<const PeerMessages> fresh, bool notes);

  // A message without data for each of `pairs`, in each direction: it fails if the two ends disagree,
  // and carries the notes. The operation must keep this object.
  std::vector<RequestPtr> requests();

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
  RequestPtr request(Direction direction, int peer, const Descriptor& descriptor, int author);

  const int rank_;
  const size_t size_;  // of the notes
  const std::vector<PeerMessages> pairs_;
  std::vector<Entry> entries_;  // what each rank says of its messages with each peer
};

}  // namespace pipecomm
