// The NCCL communicators of a rank, which are made when they are needed.
//
// A lane is a communicator with a stream, on which everything runs in the order of the calls. Its
// communicator is made of two ranks, for the messages from one of them to the other one on a channel,
// or of all ranks, for collectives. So the messages from one rank to another one on a channel keep
// their order, no other messages wait for each other, and no lane is made that nobody uses. A link is
// what the ranks of a lane say to each other until they have its communicator.
//
// The ranks of a link make it in the background. NCCL's calls wait for all of them, so each rank calls
// it on a thread of its own, and only after all have promised to come:
//
// * Ask. Either rank of a pair asks the other one, which answers by asking, too, whatever its user
//   does. Each rank that needs the link of all ranks asks for it up the tree (group_tree.h), once all
//   ranks below it have asked.
// * Id. The root of the tree, which is the lower rank of a pair, chooses the id and sends it down.
// * Join. A rank that has the id, and below which all ranks have joined, promises to come.
// * Go. The root tells all ranks, down the tree again, to connect.
//
// A rank that is about to end refuses as long as it has not joined, and all ranks of the link hear so.
#pragma once

#include <compare>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "copy/device_runtime.h"
#include "message/descriptor.h"
#include "message/operation.h"
#include "transport/nccl/nccl_transport.h"
#include "transport/transport.h"

namespace pipecomm {

// `peer` kEverybody: the stream on which the exchanges of a channel follow each other; that of the
// collectives has the communicator of all ranks.
struct LaneKey {
  int channel = kCollectiveChannel;
  int peer = kEverybody;
  bool goes_up = false;  // from the lower to the higher rank
  auto operator<=>(const LaneKey&) const = default;
};

inline LaneKey lane_of(int channel, Direction direction, int rank, int peer) {
  return {channel, peer, (direction == Direction::send) == (peer > rank)};
}

struct Lane {
  // The end of an operation, and where that ran.
  struct Latest {
    StreamHandle stream = nullptr;
    EventPtr end;
    uint64_t capture = 0;
  };
  StreamHandle stream = nullptr;
  int comm_idx = -1;         // of NcclTransport; -1: none yet
  Latest latest;             // of those that run by themselves
  Latest latest_in_capture;  // of those that are part of a graph
};

struct LinkError {
  NcclResult result = NcclResult::internal_error;
  std::string text;
};

class Links {
 public:
  // Tells a peer something about a link, in which this rank sends or receives. Called without a lock.
  using Tell = std::function<void(int peer, Direction direction, const Descriptor& claim,
                                  std::span<const std::byte> note)>;

  // A rank that is alone has no `nccl`, and only streams.
  Links(int rank, int size, std::shared_ptr<DeviceRuntime> runtime,
        std::shared_ptr<NcclTransport> nccl, NcclConfig config, Tell tell);

  // Begins to make a link, if nobody has. Never waits.
  void begin(const LaneKey& key);
  bool is_ready(const LaneKey& key) const;
  bool wait_until_ready(const LaneKey& key, Deadline until) const;
  // Whether its other ranks have said that they are there.
  bool is_answered(const LaneKey& key) const;
  // The rank that has refused it, if any.
  std::optional<int> refused_by(const LaneKey& key) const;
  // Why a link could not be made, if so. One to a rank that `has_closed` counts as refused instead.
  std::optional<LinkError> error(const std::function<bool(int peer)>& has_closed) const;

  // The lane of a ready link, or the stream of a channel at any time. It stays where it is; only the
  // holder of the lock of posts may use what it says of the latest operation.
  Lane& lane(const LaneKey& key);
  // The stream of a lane if there is one yet, else null.
  StreamHandle stream_of(const LaneKey& key) const;

  // What a peer says of a link in which it sends or receives (`theirs`), with OpCode::connect, or
  // OpCode::close and kMeeting as `signature`. False if it makes no sense.
  static constexpr uint64_t kMeeting = 1;
  bool on_claim(int peer, Direction theirs, const Descriptor& claim,
                std::span<const std::byte> note);

  // No link is begun from now on, and those whose id has not come are refused.
  void refuse_more();
  // The end: whether all ranks of each link have come to it. Until then they may read memory that
  // NCCL would free. Asks `keeps_waiting` now and then; `has_closed` tells of ranks that will not
  // answer any more.
  bool meet(const std::function<bool()>& keeps_waiting,
            const std::function<bool(int peer)>& has_closed);

 private:
  // `offered`: it has the id, and will connect or hear of a refusal.
  enum class State : uint8_t { waiting, offered, connecting, ready, failed };
  struct Link {
    bool is_begun = false;
    bool has_asked = false;                 // its parent
    std::set<int> have_asked, have_joined;  // of its children
    State state = State::waiting;
    NcclUniqueId id{};
    std::optional<int> refused_by;
    std::optional<LinkError> error;
    std::vector<bool> heard_in_round;  // of the meeting at the end
  };
  // Outlives this object as long as a thread is connecting.
  struct Shared {
    std::mutex mutex;
    std::condition_variable changed;
    std::map<LaneKey, Link> links;
    std::map<LaneKey, Lane> lanes;
    bool is_ending = false;
  };
  // What is to be done about a link, without the lock.
  enum class Step : uint8_t { nothing, invite, ask, choose, offer, join, go, refuse };

  // With the lock:
  Link& link_of(const LaneKey& key);
  Step next_step(const LaneKey& key, Link& link);
  Step begin_locked(const LaneKey& key, Link& link);
  Step step_after_id(const LaneKey& key, Link& link);
  Step refuse_locked(Link& link, int by);
  // Without it:
  void take(Step step, const LaneKey& key);
  void choose(const LaneKey& key);
  void connect_apart(const LaneKey& key);
  void say(int peer, OpCode op, const LaneKey& key, uint64_t signature, uint64_t seq = 0,
           std::span<const std::byte> note = {}) const;
  void say_to_children(const LaneKey& key, uint64_t signature,
                       std::span<const std::byte> note = {}) const;

  // The place of this rank in the tree in which ranks ask for a link.
  bool is_root(const LaneKey& key) const {
    return rank_ == 0 || (key.peer != kEverybody && key.peer > rank_);
  }
  int parent_in(const LaneKey& key) const;
  std::vector<int> children_in(const LaneKey& key) const;

  const int rank_, size_;
  const std::shared_ptr<DeviceRuntime> runtime_;
  const std::shared_ptr<NcclTransport> nccl_;
  const NcclConfig config_;
  const Tell tell_;
  const std::shared_ptr<Shared> shared_;
};

}  // namespace pipecomm
