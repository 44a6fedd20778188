#include "engine/agreement.h"

namespace pipecomm {

Agreement::Agreement(int rank, int size, std::span<const PeerMessages> pairs,
                     std::span<const PeerMessages> fresh)
    : rank_(rank), size_(size), pairs_(pairs.begin(), pairs.end()), entries_(size_t(size) * size) {
  for (const auto& pair : fresh)
    entries_[size_t(rank) * size + pair.peer] = {pair.send.num_bytes, pair.recv.num_bytes,
                                                 pair.send.signature, pair.recv.signature};
}

std::optional<Agreement::Disagreement> Agreement::disagreement() const {
  for (int source = 0; source < size_; ++source) {
    for (int destination = 0; destination < size_; ++destination) {
      const Entry& sender = at(source, destination);
      const Entry& receiver = at(destination, source);
      if (sender.send_bytes == kNotCompared || receiver.recv_bytes == kNotCompared) continue;
      if (sender.send_bytes == receiver.recv_bytes &&
          sender.send_signature == receiver.recv_signature)
        continue;
      const std::string sent = bytes_text(sender.send_bytes);
      const std::string expected = bytes_text(receiver.recv_bytes);
      return Disagreement{destination, "rank " + std::to_string(source) + " sends " + sent +
                                           " to rank " + std::to_string(destination) +
                                           ", which expects " + expected +
                                           (sent == expected ? " of other dtypes" : "")};
    }
  }
  return std::nullopt;
}

}  // namespace pipecomm
