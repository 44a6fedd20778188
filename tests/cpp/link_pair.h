// Two PeerLinks joined by a wire in memory that keeps only the order of packets.
#pragma once

#include "check.h"
#include "plan/dtype.h"
#include "transport/tcp/peer_link.h"
#include "transport/tcp/wire.h"
#include "world.h"

using wire::Kind;
using world::Random;

using Bytes = std::vector<std::byte>;

inline constexpr uint32_t kEpoch = 77;
// The promise to receivers: how many messages of a channel they may have to keep unmatched.
inline constexpr size_t kWindowRecords = 4096;
inline constexpr int64_t kWindowBytes = 4 << 20;
inline constexpr const char* kClosedText = "has closed its communicator";

inline Descriptor make_descriptor(int channel, int64_t num_bytes) {
  Descriptor descriptor;
  descriptor.op = channel == kCollectiveChannel ? OpCode::exchange : OpCode::p2p;
  descriptor.channel = uint8_t(channel);
  descriptor.num_bytes = num_bytes;
  descriptor.num_dims = 1;
  descriptor.shape[0] = num_bytes;
  return descriptor;
}

// The payload of message `seq` of a rank on a channel.
inline std::byte byte_of(int rank, int channel, uint64_t seq, size_t idx) {
  return static_cast<std::byte>((idx * 7 + seq * 31 + channel * 101 + rank * 11 + 5) & 0xff);
}

// A request of the program, and its outcome.
struct Entry {
  RequestPtr request;
  Bytes memory;
  int num_outcomes = 0;
  bool dropped = false;
  FailurePtr failure;

  bool succeeded() const { return num_outcomes == 1 && !failure; }
};
using EntryPtr = std::shared_ptr<Entry>;

// Both ranks, and the wire between them.
class Pair {
 public:
  Pair() {
    for (int rank : {0, 1})
      sides_[rank].link =
          std::make_unique<PeerLink>(rank, 1 - rank, kEpoch, [this, rank](Bytes packet) {
            CHECK(packet.size() <= wire::kMaxPacketBytes);
            ++sides_[rank].num_packets_sent;
            note_sent(rank, packet);
            if (!cut_) sides_[rank].wire.push_back(std::move(packet));
          });
  }

  PeerLink& link(int rank) { return *sides_[rank].link; }
  bool cut() const { return cut_; }
  uint64_t num_packets_sent(int rank) const { return sides_[rank].num_packets_sent; }

  EntryPtr post(int rank, Direction direction, const Descriptor& descriptor,
                const std::string& refusal = "") {
    Side& side = sides_[rank];
    const auto entry = std::make_shared<Entry>();
    entry->request = make_request(direction, 1 - rank, descriptor, nullptr);
    Request& request = *entry->request;
    request.refuses = !refusal.empty();
    request.refusal = refusal;
    entry->memory.assign(size_t(descriptor.num_bytes), std::byte{0xee});
    request.data = entry->memory.data();
    side.link->number(request);
    if (direction == Direction::send)
      for (size_t idx = 0; idx < entry->memory.size(); ++idx)
        entry->memory[idx] = byte_of(rank, descriptor.channel, request.descriptor.seq, idx);
    side.entries[entry->request.get()] = entry;
    if (has_body(request)) CHECK(request.descriptor.num_bytes > kMaxInlineBytes);
    side.link->post(entry->request);
    settle(rank);
    return entry;
  }

  void flush(int rank) {
    link(rank).flush();
    settle(rank);
  }

  // The next packet of the wire from `rank`; false if there is none.
  bool deliver(int rank) {
    std::deque<Bytes>& wire = sides_[rank].wire;
    if (wire.empty()) return false;
    Bytes packet = std::move(wire.front());
    wire.pop_front();
    packet.resize(wire::kMaxPacketBytes, std::byte{0xdd});
    link(1 - rank).handle_packet(packet);
    std::fill(packet.begin(), packet.end(), std::byte{0xcc});  // the slot is used again
    settle(1 - rank);
    return true;
  }

  // Moves one piece of a body that its receiver stands ready for, behind all packets that precede it;
  // false for none.
  bool move_body(Random& random) {
    if (cut_) return false;
    const int rank = int(random.between(0, 1));
    return move_body_of(rank, random) || move_body_of(1 - rank, random);
  }
  bool move_body_of(int rank, Random& random) {
    flush(rank);
    Side& side = sides_[rank];
    if (side.bodies.empty()) return false;
    while (deliver(rank)) {
    }
    auto& [send, num_sent] = side.bodies.front();
    if (sides_[rank].entries.at(send.get())->dropped) return side.bodies.pop_front(), true;
    const Descriptor& descriptor = send->descriptor;
    if (num_sent == 0)  // that its receiver stands ready is the answer to its announcement
      CHECK_EQ(side.unanswered[descriptor.channel].erase(descriptor.seq), 1u);
    const int64_t left = descriptor.num_bytes - num_sent;
    const auto num_bytes = uint32_t(random.chance(0.3) ? random.between(1, left) : left);
    const auto place = link(1 - rank).place_for(descriptor.channel, descriptor.seq, num_bytes);
    std::copy_n(send->data + num_sent, place.size(), place.data());
    link(1 - rank).piece_arrived(descriptor.channel, descriptor.seq);
    settle(1 - rank);
    num_sent += num_bytes;
    if (num_sent == descriptor.num_bytes) {
      link(rank).body_gone(send);
      side.bodies.pop_front();
    }
    settle(rank);
    return true;
  }

  // The connection is gone: no packet and no body any more.
  void cut_wire() {
    cut_ = true;
    for (Side& side : sides_) side.wire.clear();
  }

  void lose(int rank) {
    link(rank).lose();
    settle(rank);
  }

  void drop(int rank) {
    for (const RequestPtr& request : link(rank).drop()) {
      const auto found = sides_[rank].entries.find(request.get());
      CHECK(found != sides_[rank].entries.end());
      CHECK_EQ(found->second->num_outcomes, 0);
      found->second->dropped = true;
    }
  }

  // Delivers everything that is in flight.
  void run_to_quiet(Random& random) {
    for (bool busy = true; busy;) {
      busy = false;
      for (int rank : {0, 1}) {
        flush(rank);
        busy |= deliver(rank);
      }
      busy |= move_body(random);
    }
  }

  size_t num_pending(int rank) const {
    size_t count = 0;
    for (const auto& [request, entry] : sides_[rank].entries)
      count += entry->num_outcomes == 0 && !entry->dropped;
    return count;
  }
  // On one channel in one direction, as the peers see it on the wire.
  size_t most_unanswered() const { return most_unanswered_; }

  // The requests that anything but the caller and this object still holds, after the end.
  size_t num_retained() {
    for (Side& side : sides_) side.bodies.clear();
    size_t count = 0;
    for (const Side& side : sides_)
      for (const auto& [request, entry] : side.entries) count += entry->request.use_count() > 1;
    return count;
  }

 private:
  struct Side {
    std::unique_ptr<PeerLink> link;
    std::deque<Bytes> wire;  // packets from here
    // Bodies that leave from here, and how much of them has left.
    std::deque<std::pair<RequestPtr, int64_t>> bodies;
    uint64_t num_packets_sent = 0;
    std::map<Request*, EntryPtr> entries;
    // Message records by channel and number, with the bytes that they carry.
    std::map<int, std::set<uint64_t>> unanswered;
  };

  void settle(int rank) {
    for (const PeerLink::Outcome& outcome : link(rank).take_outcomes()) {
      const auto found = sides_[rank].entries.find(outcome.request.get());
      CHECK(found != sides_[rank].entries.end());
      Entry& entry = *found->second;
      CHECK(!entry.dropped);
      CHECK_EQ(++entry.num_outcomes, 1);
      entry.failure = outcome.failure;
    }
    for (const RequestPtr& request : link(rank).take_departing()) {
      CHECK(has_body(*request) && request->direction == Direction::send);
      sides_[rank].bodies.emplace_back(request, 0);
    }
  }

  // Follows the messages and answers on the wire, to see how much is unanswered per channel.
  void note_sent(int rank, const Bytes& packet) {
    const wire::PacketReader reader(packet, kEpoch);
    for (const wire::Record& record : reader.records()) {
      const auto& [kind, channel, seq] =
          std::tuple(record.header.kind, int{record.header.channel}, record.header.seq);
      const auto is_one_of = [kind](std::initializer_list<Kind> kinds) {
        return std::ranges::find(kinds, kind) != kinds.end();
      };
      if (is_one_of({Kind::data, Kind::announce, Kind::refuse})) {
        auto& unanswered = sides_[rank].unanswered[channel];
        CHECK(unanswered.insert(seq).second);
        most_unanswered_ = std::max(most_unanswered_, unanswered.size());
      }
      const bool answers_goodbye = seq == UINT64_MAX;
      if (is_one_of({Kind::accept, Kind::reject, Kind::refused}) && !answers_goodbye)
        CHECK_EQ(sides_[1 - rank].unanswered[channel].erase(seq), 1u);  // each is answered once
    }
  }

  Side sides_[2];
  bool cut_ = false;
  size_t most_unanswered_ = 0;
};

inline void check_failure(const Entry& entry, int rank, FailureKind kind, int origin,
                          const std::string& text) {
  CHECK_EQ(entry.num_outcomes, 1);
  CHECK(entry.failure != nullptr);
  if (!entry.failure) return;
  CHECK(entry.failure->kind == kind);
  CHECK_EQ(entry.failure->rank, rank);
  CHECK_EQ(entry.failure->peer, 1 - rank);
  CHECK_EQ(entry.failure->origin_rank, origin);
  CHECK_EQ(entry.failure->channel, int{entry.request->descriptor.channel});
  CHECK_EQ(entry.failure->seq, int64_t(entry.request->descriptor.seq));
  CHECK_CONTAINS(entry.failure->message, text);
}
