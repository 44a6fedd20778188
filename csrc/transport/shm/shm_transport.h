// Transport between ranks of one host through shared memory; layout.h describes the memory, the
// protocol and the wake-up rules.
//
// The calling thread does the work: post() moves what can move at once, and a waiting thread
// advances the lanes itself (assist), so that blocking messages need no hand-over between threads.
// While no user thread waits, the progress thread sleeps until a peer wakes it, so asynchronous
// operations progress. Any change that makes a transfer possible wakes one of the two. Both write large
// payloads that their receiver has granted, if there are enough cores.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "transport/cores.h"
#include "transport/patience.h"
#include "transport/process_watch.h"
#include "transport/shm/lane.h"
#include "transport/transport.h"

namespace pipecomm::shm {

struct ShmOptions {
  std::shared_ptr<const SharedCores> cores;
  // Called once for each peer that has mapped this rank's segment, or has left without doing so:
  // messages may go to it if this rank has added it, too. Called without a lock.
  std::function<void(int peer)> on_met = nullptr;
  // Requests have been completed, by a thread that may not be the one that waits for them.
  std::function<void()> on_settled = nullptr;
};

class ShmTransport final : public HostTransport {
 public:
  ShmTransport(SegmentPtr own, ShmOptions options, TransportEvents& events);
  ~ShmTransport() override;

  bool copies_on_the_way() const override { return true; }
  std::shared_ptr<std::byte> allocate_result(int64_t num_bytes) override;
  // Meets a peer, whose process is watched (null: a thread of this process). Messages may go to it
  // and come from it once it has met this rank as well, or has left.
  void add_peer(SegmentPtr segment, std::unique_ptr<ProcessWatch> watch);
  // No peer is added from now on: a broadcast to all of them may go through one ring.
  void note_all_added() { all_added_ = true; }
  // Messages that waited for the route to the peer are posted; all others now come directly.
  void note_routed(int peer);
  // Makes an assisting thread check whether its operation is done.
  void nudge();
  void post(std::span<const RequestPtr> batch, bool is_async) override;
  bool assist(Operation& operation) override;
  void advance() override { hand_over(); }
  bool tick() override;
  void abort(const Failure& failure) override;
  void begin_close() override;
  void close(Deadline deadline) override;
  std::string describe_peer(int peer) const override;

 private:
  struct Peer {
    SegmentPtr segment;
    std::unique_ptr<ProcessWatch> watch;
    std::vector<std::unique_ptr<Outbound>> outbound;  // by lane
    std::vector<std::unique_ptr<Inbound>> inbound;
    bool failure_seen = false;
    bool lost = false;
    bool is_routed = false;
  };

  enum class Turn : uint8_t { idle, moved, over };
  enum class By : uint8_t { assistant, others };

  int lane_of(const Request& request) const;
  Turn turn(By by, uint32_t sleepers);
  void hand_over();
  bool busy() const;
  bool is_urgent() const;
  void update_sleepers(uint32_t sleepers);
  bool advance_lanes();
  std::vector<int> newly_met();
  void finish(Peer& peer);
  bool any_pieces() const;
  bool write_piece(By by);
  void look_for_failures(std::vector<Failure>& failures);
  void post_multicasts(std::span<const RequestPtr> batch);
  void wake_peers();
  void end_window();
  bool leave_crowded_core(Clock::time_point now);
  void progress();

  const SegmentPtr own_segment_;
  Segment& own_;
  const ShmOptions options_;
  const int rank_;
  const int size_;
  const int num_cores_;
  TransportEvents& events_;
  std::optional<WindowPool> window_;

  mutable std::mutex mutex_;  // everything down to the line
  LaneContext context_;
  std::vector<std::unique_ptr<Peer>> peers_;  // by rank; null: not added
  std::vector<bool> met_;                     // by rank: told
  uint64_t num_met_ = 0;                      // as last seen
  std::vector<Outbound*> sending_;            // only busy ones
  std::vector<Inbound*> receiving_;
  std::optional<MulticastWriter> multicast_;
  int num_pieces_ = 0;  // being written, without the lock
  std::condition_variable pieces_written_;
  bool assisted_ = false;
  bool is_awaited_ = false;  // perhaps by a thread that does not assist
  bool any_failure_seen_ = false;
  bool aborted_ = false;
  bool closing_ = false;
  // ---

  std::atomic<int> num_peers_{0};
  std::atomic<bool> all_added_{false};
  std::atomic<bool> over_{false};  // aborted or closed: nothing moves any more
  std::atomic<bool> stopping_{false};
  std::mutex assist_mutex_;  // held by the one thread that assists; down to the line
  SpinTime spin_time_;
  Clock::time_point next_look_at_;  // for an emptier core
  int num_left_to_higher_ = 0;
  // ---
  std::thread progress_thread_;
};

}  // namespace pipecomm::shm
