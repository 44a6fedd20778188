// Moves bytes between devices with NCCL. NCCL has no tags, and runs what a communicator is given in
// order, so there is one communicator for each order of messages: those from one rank to another one
// on a channel, or the exchanges of some ranks on a channel. Messages go in groups of bounded size, in
// rounds that both ends compute alike. Errors are found by polling.
#pragma once

#include <algorithm>
#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "copy/device_runtime.h"
#include "message/operation.h"
#include "transport/nccl/lane_key.h"
#include "transport/nccl/nccl_api.h"
#include "transport/nccl/nccl_rounds.h"

namespace pipecomm {

class NcclError : public std::runtime_error {
 public:
  NcclError(NcclResult result, const std::string& text)
      : std::runtime_error(text), result_(result) {}
  NcclResult result() const { return result_; }

 private:
  NcclResult result_;
};

// A communicator to be made.
struct NcclLane {
  LaneKey key;
  NcclUniqueId id{};
  bool is_within_host = false;    // all its ranks, which know so
  StreamHandle stream = nullptr;  // for connecting
};

// What one communicator does in a batch.
struct LaneMessages {
  int comm_idx = 0;
  StreamHandle stream = nullptr;
  std::vector<DeviceMessage> messages;
  bool is_captured = false;  // in a graph, whose replays nobody sees
};

// Thread blocks of a communicator that is not that of the collectives, unless the options say more: over a
// network, and within a host, where NVLink takes more of them. NCCL takes buffers for each of them, and
// they spin while they wait: many lanes with NCCL's own choice would take tens of GB and all
// multiprocessors. A message mostly gets half of them.
inline constexpr int kNetworkMaxCtas = 4;
inline constexpr int kHostMaxCtas = 16;
// From so many communicators of a rank on hosts with NVSwitch on, users are warned: NCCL takes one of 128
// multicast groups of the host for each.
inline constexpr int kManyWithinHost = 48;

// Calls that enqueue work come from one thread at a time; the others from any. Only connect() waits
// for other ranks, so the communicators are blocking; non-blocking ones (the user has set
// NCCL_COMM_BLOCKING=0) are waited for.
class NcclTransport {
 public:
  // Asked whenever a call has to wait for NCCL; ends the wait by throwing.
  using KeepWaiting = std::function<void()>;

  NcclTransport(const NcclApi& api, std::shared_ptr<DeviceRuntime> runtime, int rank, int size,
                int max_ops_per_group);
  ~NcclTransport();
  NcclTransport(const NcclTransport&) = delete;
  NcclTransport& operator=(const NcclTransport&) = delete;

  // For the rank that chooses the ids of a communicator, which its other ranks get from it.
  NcclUniqueId new_id() const;

  // Makes a communicator, and in it the connections that its messages need, so that no other call has
  // to make one; returns its number (comm_idx). All its ranks call it. Waits in NCCL until they have
  // come, even after abort(): for a thread that can be left behind. Any number of threads may be at
  // it. Throws NcclError; nothing is left then.
  int connect(const NcclLane& lane, const NcclConfig& config);

  // These enqueue on streams; a broadcast is one message. The first returns how many thread blocks its
  // kernels have. They throw NcclError, after which only abort() makes sense. All lanes
  // of a batch share the groups.
  int send_and_receive(std::span<const LaneMessages> lanes, const KeepWaiting& keep_waiting);
  void broadcast(const LaneMessages& lane, int source, const KeepWaiting& keep_waiting);

  struct Usage {
    int num_comms = 0;
    int64_t num_bytes = 0;    // of the device that were taken while they were made, by whomever
    int num_within_host = 0;  // that may have two ranks of this host
  };
  Usage usage() const { return {num_comms_, num_bytes_, num_within_host_}; }
  // When a message was last given to a communicator that is not of one host: NCCL may hold it on this
  // host until its receiver takes it. Long ago if there was none.
  Clock::time_point sent_over_network_at() const { return sent_over_network_at_; }

  // Throws the asynchronous error of a communicator, if there is one. Never waits.
  void poll();

  // Makes all kernels in flight leave, and frees everything once no other thread is in a call of NCCL.
  // May take long if another thread hangs in the CUDA driver, and does not return while a captured graph
  // is alive. Leaves the rest to connect() if that is under way. Idempotent.
  void abort();

  // For an orderly end, once nothing is in flight. Frees everything, but what is part of a captured graph
  // not before that is destroyed, and nothing before all ranks of the node have called it: for a thread
  // that can be left behind.
  void finish();

 private:
  class GroupCalls;
  using Comms = std::span<NcclComm* const>;
  struct Comm {
    NcclComm* comm = nullptr;  // null once freed
    LaneKey key;
    std::vector<int> ranks;  // increasing: a rank's number in it is its place among them
    bool is_within_host = false;
    int num_blocks = 1;          // of a message, mostly
    bool is_in_a_graph = false;  // whose life its end waits for
    int rank_of(int rank) const {
      return int(std::ranges::lower_bound(ranks, rank) - ranks.begin());
    }
  };

  void require(const char* call, NcclResult result, NcclComm* comm) const;
  bool in_progress(const char* call, NcclComm* comm) const;
  void settle(const char* call, NcclResult result, Comms comms,
              const KeepWaiting& keep_waiting) const;
  void init(const NcclLane& lane, const NcclConfig& config, Comm& comm);
  void greet_peers(const NcclLane& lane, const Comm& comm);
  void enqueue(std::span<const LaneMessages> lanes, std::span<const Comm> comms,
               const KeepWaiting& keep_waiting);
  void enqueue_broadcast(NcclComm* comm, std::byte* data, int64_t num_bytes, int source,
                         StreamHandle stream, const KeepWaiting& keep_waiting);
  void note_use(const LaneMessages& lane);
  std::pair<int, int> step_of(const LaneMessages& lane) const;
  std::vector<std::span<const LaneMessages>> cut_batch(std::span<const LaneMessages> lanes) const;
  void end_in_order(std::span<Comm> comms);
  void note_connecting();
  void check_alive() const;
  [[noreturn]] static void throw_ended();
  void abort_all(std::vector<Comm> comms);

  const NcclApi api_;
  const std::shared_ptr<DeviceRuntime> runtime_;
  const int rank_;
  const int size_;
  const int max_ops_per_group_;
  const int max_blocks_;  // of a batch, at a time
  std::mutex calls_;      // NCCL allows one call at a time on a communicator
  std::vector<Comm> comms_;
  std::atomic<bool> ended_{false};  // abort() or finish() has been called

  mutable std::mutex connect_mutex_;  // down to the end; taken after calls_
  std::deque<NcclConfig> configs_;    // NCCL keeps pointers to the names
  int num_connecting_ = 0;
  int64_t free_bytes_before_ = 0;  // they began
  // Read without a lock, by threads that hold others.
  std::atomic<int> num_comms_{0};
  std::atomic<int> num_within_host_{0};
  std::atomic<int64_t> num_bytes_{0};
  std::atomic<Clock::time_point> sent_over_network_at_{Clock::time_point::min()};
};

}  // namespace pipecomm
