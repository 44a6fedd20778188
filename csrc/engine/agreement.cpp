#include "engine/agreement.h"

namespace pipecomm {

Agreement::Agreement(int rank, int size, std::span<const PeerMessages> pairs,
                     std::span<const PeerMessages> fresh, bool notes)
    : rank_(rank),
      size_(notes ? size_t(size) : 0),
      pairs_(pairs.begin(), pairs.end()),
      entries_(size_ * size_) {
  if (!notes) return;
  for (const auto& pair : fresh)
    entries_[size_t(rank) * size_ + pair.peer] = {pair.send.num_bytes, pair.recv.num_bytes,
                                                  pair.send.signature, pair.recv.signature};
}

// With the note of `author`: this rank, or the peer.
RequestPtr Agreement::request(Direction direction, int peer, const Descriptor& descriptor,
                              int author) {
  const auto note =
      std::as_writable_bytes(std::span(entries_).subspan(size_t(author) * size_, size_));
  RequestPtr request = make_request(direction, peer, descriptor, note.data());
  request->num_note_bytes = static_cast<int64_t>(note.size());
  return request;
}

std::vector<RequestPtr> Agreement::requests() {
  std::vector<RequestPtr> requests;
  for (const PeerMessages& pair : pairs_)
    requests.push_back(request(Direction::recv, pair.peer, pair.recv, pair.peer));
  for (const PeerMessages& pair : pairs_)
    requests.push_back(request(Direction::send, pair.peer, pair.send, rank_));
  return requests;
}

std::optional<Agreement::Disagreement> Agreement::disagreement() const {
  const int size = static_cast<int>(size_);
  for (int source = 0; source < size; ++source) {
    for (int destination = 0; destination < size; ++destination) {
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
