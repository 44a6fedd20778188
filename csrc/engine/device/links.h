// The NCCL communicators of a rank, which are made on first use.
//
// A lane is a communicator with a stream, which runs its work in the order of the calls: the
// messages from one rank to another one on a channel, or the exchanges of some ranks on a channel.
// So messages of different lanes do not wait for each other, and no unused lane is made. A link is
// the protocol by which the ranks of a lane make its communicator.
//
// The ranks of a link make it in the background. NCCL's calls wait for all of them, so each rank
// calls NCCL on a separate thread, and only after all have promised to come, along the tree of the
// ranks of the link (group_tree.h):
//
// * Invite. A rank that needs a link invites its neighbours in the tree, which take part
//   independent of their application, and invite theirs.
// * Ask. A rank asks its parent once all ranks below it have asked.
// * Offer. The root offers to make it, down the tree.
// * Join. A rank below which all ranks have joined promises to come.
// * Go. The root chooses NCCL's id, and sends it down the tree; each rank that has it connects.
//
// A rank has at most kMaxInTheMaking links of pairs between offer and completion, since each takes
// a thread and threads of NCCL. The lower rank of a pair, which is the root, takes one of these
// places before it offers, and the higher one before it joins; so ranks cannot wait for places in a
// circle.
//
// A closing rank refuses links that it has no offer for; the refusal reaches all their ranks.
#pragma once

#include <condition_variable>
#include <deque>
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
#include "engine/device/control_message.h"
#include "engine/device/link_state.h"
#include "transport/nccl/nccl_transport.h"
#include "transport/transport.h"

namespace pipecomm {

inline constexpr int kMaxInTheMaking = 4;

struct Lane {
  // The end of an operation, and the stream that it ran on.
  struct Latest {
    StreamHandle stream = nullptr;
    EventPtr end;
    uint64_t capture = 0;
  };
  StreamHandle stream = nullptr;
  int comm_idx = -1;         // of NcclTransport; -1: none yet
  Latest latest;             // operation outside of graphs
  Latest latest_in_capture;  // operation that is part of a graph
};

struct LinkError {
  NcclResult result = NcclResult::internal_error;
  std::string text;
};

// Shared with the threads that connect, since one is left behind if NCCL does not return.
class Links : public std::enable_shared_from_this<Links> {
 public:
  using Send = std::function<void(int peer, const ControlMessage& message)>;

  // A group of one has no `nccl`, and only streams. Ranks with the same `host`, if it is not 0, are
  // on one host.
  Links(int rank, int size, uint64_t host, std::shared_ptr<DeviceRuntime> runtime,
        std::shared_ptr<NcclTransport> nccl, NcclConfig config, Send send,
        std::shared_ptr<ConnectionEvents> connection_events);

  // Begins to make a link, unless that has begun. Never waits.
  void begin(const LaneKey& key);
  bool is_ready(const LaneKey& key) const;
  bool wait_until_ready(const LaneKey& key, Deadline until) const;
  // Whether the other ranks of the link have answered.
  bool is_answered(const LaneKey& key) const;
  // The rank that has refused the link, if any.
  std::optional<int> refused_by(const LaneKey& key) const;
  // Why a link could not be made, if one failed. A pair's link counts as refused instead if the
  // other rank `has_closed`.
  std::optional<LinkError> error(const std::function<bool(int peer)>& has_closed);

  // The lane of a ready link; or, at any time, with the key of the exchanges of all ranks on a
  // channel, the lane whose stream runs all exchanges of that channel. The reference stays valid;
  // only the holder of the lock of posts may use its latest operations.
  Lane& lane(const LaneKey& key);
  // The stream of a lane if there is one yet, else null.
  StreamHandle stream_of(const LaneKey& key) const;

  // Handles a peer's message about a link. False if it is invalid.
  bool receive(int peer, const ControlMessage& message);

  // Begins no link any more, and refuses those that have not been offered.
  void refuse_more();
  // At shutdown: waits for all ranks of each link, and returns whether they have come. Until then
  // they may read memory that NCCL would free. Calls `keeps_waiting` now and then; a rank that
  // `has_closed` will not answer any more.
  bool meet(const std::function<bool()>& keeps_waiting,
            const std::function<bool(int peer)>& has_closed);
  // Sends nothing any more.
  void stop_sending();

 private:
  using State = LinkState;
  struct Link {
    std::vector<int> ranks;  // increasing
    int parent = -1;         // in their tree; -1: this rank is the root
    std::vector<int> children;
    uint64_t name = 0;  // in messages
    uint64_t host = 0;  // of this rank and the ranks below that have asked; 0: several
    bool has_asked = false, has_place = false, has_joined = false;
    std::set<int> have_asked, have_joined;  // of its children
    State state = State::unused;
    std::optional<int> refused_by;
    std::optional<LinkError> error;
    std::vector<bool> has_met_in_round;  // of the meeting at the end
  };
  using Entry = std::pair<const LaneKey, Link>;
  using Kind = ControlMessage::Kind;
  // Messages to send and links to connect once the lock is released.
  struct Outgoing {
    int peer;
    ControlMessage message;
  };
  struct Connecting {
    const Entry* entry;
    bool is_within_host;
    std::optional<NcclUniqueId> id;  // none: this rank, the root, chooses it
  };
  struct ToDo {
    std::vector<Outgoing> to_send;
    std::vector<Connecting> to_connect;
  };

  // With the lock:
  Entry& entry_of(const LaneKey& key);
  void enter(Entry& entry, State state, const std::string& detail = "");
  Entry* named(int peer, const ControlMessage& message);
  void begin_locked(Entry& entry, int invited_by, ToDo& to_do);
  void go_on(Entry& entry, ToDo& to_do);
  void refuse_locked(Entry& entry, int by, ToDo& to_do);
  bool take_place(Entry& entry);
  void leave_place(Entry& entry, ToDo& to_do);
  static ControlMessage message_of(const Entry& entry, Kind kind, uint64_t number = 0,
                                   std::span<const std::byte> id = {});
  static void send_to_children(const Entry& entry, const ControlMessage& message, ToDo& to_do);
  bool handle(int peer, Entry& entry, const ControlMessage& message, ToDo& to_do);
  // Without it:
  void perform(const ToDo& to_do);
  void connect_apart(const Connecting& connecting);
  void connect(const Connecting& connecting);
  void settle(const LaneKey& key, State state, const std::function<void(Link&)>& note);
  void send(int peer, const ControlMessage& message);

  const int rank_, size_;
  const uint64_t host_;
  const std::shared_ptr<DeviceRuntime> runtime_;
  const std::shared_ptr<NcclTransport> nccl_;
  const NcclConfig config_;
  const std::shared_ptr<ConnectionEvents> connection_events_;
  std::mutex sending_mutex_;
  Send send_;  // null: nothing is sent any more

  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  std::map<LaneKey, Link> links_;  // never erased
  std::map<uint64_t, Entry*> names_;
  std::map<LaneKey, Lane> lanes_;
  std::deque<Entry*> wait_for_place_;
  int num_in_the_making_ = 0;
  bool is_ending_ = false;
};

}  // namespace pipecomm
