// Moves bytes between devices with NCCL. NCCL has no tags, and runs the work of a communicator in
// order, so there is one communicator for each order of messages: those from one rank to another
// one on a channel, or the exchanges of some ranks on a channel. Messages are enqueued in groups of
// bounded size, in rounds that are the same on both ends. Errors are found by polling.
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
  NcclError(NcclResult the_result, const std::string& text)
      : std::runtime_error(text), result(the_result) {}
  const NcclResult result;
};

// A communicator to be made.
struct NcclLane {
  LaneKey key;
  NcclUniqueId id{};
  bool is_within_host = false;    // all its ranks are on one host, and know that
  StreamHandle stream = nullptr;  // for connecting
};

// The part of a batch on one communicator.
struct LaneMessages {
  int comm_idx = 0;
  StreamHandle stream = nullptr;
  std::vector<DeviceMessage> messages;
  bool is_captured = false;  // in a graph, whose replays are not observed
};

// One call of ncclAllReduce, ncclReduce, ncclReduceScatter or ncclAllGather.
struct NcclReduction {
  OpCode op;
  const std::byte* source;
  std::byte* destination;
  size_t count;  // elements that one rank sends to all, or receives of the result
  int dtype;
  int reduction = 0;  // unused by all_gather
  int root = 0;       // of reduce
};

// Thread blocks of a communicator other than that of the collectives, unless the options set more:
// over a network, and within a host, where NVLink needs more of them. NCCL allocates buffers for
// each block, and waiting blocks spin: many lanes with NCCL's own choice would take tens of GB and
// all multiprocessors. A message mostly gets half of the blocks.
inline constexpr int kNetworkMaxCtas = 4;
inline constexpr int kHostMaxCtas = 16;
// Users are warned from this number of communicators of a rank on, on hosts with NVSwitch: NCCL
// takes one of the host's 128 multicast groups for each.
inline constexpr int kManyWithinHost = 48;

// Only one thread at a time may call functions that enqueue work; any thread may call the others.
// Only connect() waits for other ranks, and a reduction that is the first to take an algorithm of
// NCCL, so the communicators are blocking; calls of non-blocking ones (the user has set
// NCCL_COMM_BLOCKING=0) are waited for.
class NcclTransport {
 public:
  // Called repeatedly while a call waits for NCCL; ends the wait by throwing.
  using KeepWaiting = std::function<void()>;

  NcclTransport(const NcclApi& api, std::shared_ptr<DeviceRuntime> runtime, int rank, int size,
                int max_ops_per_group);
  ~NcclTransport();
  NcclTransport(const NcclTransport&) = delete;
  NcclTransport& operator=(const NcclTransport&) = delete;

  // For the rank that chooses the id of a communicator and sends it to the other ranks.
  NcclUniqueId new_id() const;

  // Makes a communicator, and the connections that its messages need, so that no other call has to
  // make one; returns its number (comm_idx). All its ranks call it. Waits in NCCL for the other
  // ranks, even after abort(), so call it on a thread that can be left behind. Any number of
  // threads may call it. Throws NcclError, and then leaves nothing behind.
  int connect(const NcclLane& lane, const NcclConfig& config);

  // These enqueue on streams; a broadcast and a reduction are one message. The first returns the
  // number of thread blocks of its kernels. They throw NcclError, after which only abort() makes
  // sense. All lanes of a batch share the groups.
  int send_and_receive(std::span<const LaneMessages> lanes, const KeepWaiting& keep_waiting);
  void broadcast(const LaneMessages& lane, int source, const KeepWaiting& keep_waiting);
  void reduce(const LaneMessages& lane, const NcclReduction& call, const KeepWaiting& keep_waiting);

  struct Usage {
    int num_comms = 0;
    int64_t num_bytes = 0;    // device memory taken while they were made, by any user of the device
    int num_within_host = 0;  // communicators that may have two ranks of this host
  };
  Usage usage() const { return {num_comms_, num_bytes_, num_within_host_}; }
  // When a message was last enqueued on a communicator across hosts: NCCL may hold it on this host
  // until its receiver takes it. Long ago if there was none.
  Clock::time_point sent_over_network_at() const { return sent_over_network_at_; }

  // Whether abort() ends calls that wait in NCCL for other ranks.
  bool can_revoke() const { return api_.comm_revoke != nullptr; }
  // Throws the asynchronous error of a communicator, if there is one. Never waits.
  void poll();

  // Makes all kernels in flight return, and frees everything once no other thread is in a call of
  // NCCL. May take long if another thread hangs in the CUDA driver, and does not return while a
  // captured graph is alive. A running connect() frees its communicator itself. Idempotent.
  void abort();

  // For an orderly end, once nothing is in flight. Frees everything, but waits until all ranks of
  // the node have called it, and until captured graphs that use a communicator are destroyed: so
  // call it on a thread that can be left behind.
  void finish();

 private:
  class GroupCalls;
  using Comms = std::span<NcclComm* const>;
  struct Comm {
    NcclComm* comm = nullptr;  // null once freed
    LaneKey key;
    std::vector<int> ranks;  // increasing: the place in this list is the NCCL rank
    bool is_within_host = false;
    int num_blocks = 1;          // of most messages
    bool is_in_a_graph = false;  // NCCL frees it only after the graph
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
  void check_alive() const;
  [[noreturn]] static void throw_ended();
  void abort_all(std::vector<Comm> comms);

  const NcclApi api_;
  const std::shared_ptr<DeviceRuntime> runtime_;
  const int rank_;
  const int size_;
  const int max_ops_per_group_;
  const int max_blocks_;  // of a batch, at one time
  std::mutex calls_;      // NCCL allows one call at a time on a communicator
  std::vector<Comm> comms_;
  std::atomic<bool> ended_{false};  // abort() or finish() has been called

  mutable std::mutex connect_mutex_;  // down to the end; taken after calls_
  std::deque<NcclConfig> configs_;    // NCCL keeps pointers to the names
  int num_connecting_ = 0;
  int64_t free_bytes_before_ = 0;  // free memory of the device before they began
  // Read without a lock, by threads that hold others.
  std::atomic<int> num_comms_{0};
  std::atomic<int> num_within_host_{0};
  std::atomic<int64_t> num_bytes_{0};
  std::atomic<Clock::time_point> sent_over_network_at_{Clock::time_point::min()};
};

}  // namespace pipecomm
