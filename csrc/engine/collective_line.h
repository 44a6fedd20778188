// Runs the collectives of a large group: agreement along a tree, and only if the members do not
// agree, a message in each direction between any two of them, which names the error as in a small
// group.
//
// An exchange sends its data immediately, in parallel with the agreement. A broadcast sends its
// data down the tree once all agree. If the members do not agree, each posts the remaining messages
// of the direct exchange, so any two still have one message in each direction, and both are at the
// same place in the order when the next collective starts.
//
// The collectives of a rank run one after the other: the next one starts when this rank has posted
// the last message of the previous one. Otherwise the messages that follow a verdict or a piece
// would be posted after those of later collectives on one rank and before them on another. All
// ranks call the collectives in one order, so they cannot wait for each other in a circle.
//
// This class has no thread: the thread that starts a collective or settles one of its messages also
// runs the next steps. One thread at a time does so, and holds no lock while it posts, since
// posting may settle further messages at once; other threads queue their events for it.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "engine/agreement_tree.h"
#include "message/operation.h"
#include "transport/transport.h"

namespace pipecomm {

// Up to this many members tell each other directly. The limit is the same for all transports, since
// ranks must choose alike before they know their routes. Measured on two cores with 4 to 16 ranks
// (medians): exchanges of data between all pairs are 1.4 to 1.7 times faster without the agreement
// beside them. Over TCP the tree makes barriers 2.4, broadcasts 1.6 and sparse exchanges 1.3 times
// faster with 8 ranks, and 4.2, 3.1 and 2.6 times with 16. Over shared memory it makes barriers and
// sparse exchanges 1.1 to 1.4 times slower, and broadcasts from 8 ranks on 1.1 times faster at most.
inline constexpr int kDirectLimit = 8;

// Payloads of broadcasts are passed on in pieces of this size.
inline constexpr int64_t kPieceBytes = 1 << 20;

// What one rank brings to a collective.
struct Collective {
  OperationPtr operation;
  std::vector<int> members;  // increasing, this rank among them; empty: all ranks
  // All members' description of a message without data; for a broadcast, of the payload message.
  Descriptor common = {};
  bool refuses = false;
  // The direct exchange with these ranks: the receives from all of them, then the sends.
  std::function<std::vector<RequestPtr>(std::span<const int> peers)> messages_with = nullptr;
  std::vector<int> data_peers = {};  // of an exchange
  int source = -1;                   // of a broadcast
  std::byte* payload = nullptr;
};

class CollectiveLine {
 public:
  CollectiveLine(int rank, int size, int direct_limit, HostTransport& transport)
      : rank_(rank), size_(size), direct_limit_(direct_limit), transport_(transport) {}

  // Queues the collective behind all earlier ones. Not called by two threads at a time.
  void submit(Collective collective, bool is_async);
  // Whether nothing more is to be posted, except for operations whose end their callers have seen.
  bool wait_until_idle(Deadline until);
  // Posts nothing more, and drops the queued collectives.
  void stop();

 private:
  // Buffers of the statements that the edges carry; the operation keeps them alive.
  struct Words {
    std::vector<Statement> heard, said;
  };
  struct Current {
    Collective collective;
    TreePlace place;
    AgreementTree tree{place};
    BroadcastRoute route;
    std::shared_ptr<Words> words;
    std::set<std::pair<Direction, int>> posted;  // of the direct exchange
    bool is_whole_here = false;                  // the payload, at the root
    FailurePtr payload_failure;
    std::vector<bool> has_piece;
    size_t num_passed_on = 0;
    bool is_over = false;  // all messages are posted
  };
  enum class What : uint8_t { heard, whole, piece };
  struct Event {
    uint64_t number;  // of the collective
    What what;
    int idx;  // of the member that was heard, or of the piece
    FailurePtr failure;
  };
  struct Batch {
    std::vector<RequestPtr> recvs, sends;
  };

  void run(std::unique_lock<std::mutex>& lock, bool is_async);
  bool step(std::unique_lock<std::mutex>& lock, bool is_async);
  void post(std::unique_lock<std::mutex>& lock, std::vector<RequestPtr> requests, bool is_async);

  // For the current collective; called by the thread that runs, without the lock.
  void start(Batch& batch);
  void handle(const Event& event, Batch& batch);
  void say(const std::vector<AgreementTree::Message>& messages, Batch& batch);
  void decide(Batch& batch);
  void exchange_directly(Batch& batch);
  void receive_pieces(Batch& batch);
  void pass_on(Batch& batch);

  int num_members() const;
  int rank_of(int member) const;
  int member_of(int rank) const;
  std::vector<int> peers() const;
  RequestPtr control_request(Direction direction, int member, Statement* word) const;
  RequestPtr piece_request(Direction direction, int member, size_t idx) const;
  std::function<FailurePtr(FailurePtr)> tell(What what, int idx);

  const int rank_, size_, direct_limit_;
  HostTransport& transport_;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Collective> waiting_;
  std::deque<Event> events_;
  bool is_running_ = false;
  bool is_stopped_ = false;
  // Used by the thread that runs:
  std::optional<Current> current_;
  uint64_t number_ = 0;                // of `current_`
  OperationPtr current_operation_;     // also written under the lock
  std::vector<RequestPtr> sends_;      // to be posted as one batch when nothing else is left to do
  std::vector<OperationPtr> through_;  // all messages are posted; to be released
};

}  // namespace pipecomm
