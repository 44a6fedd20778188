// Moves bytes between devices with NCCL. NCCL has no tags, so there is one communicator for each
// order of messages. Messages go in groups of bounded size, in rounds that both ends compute alike.
// Errors are found by polling.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "copy/device_runtime.h"
#include "message/operation.h"
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

// Which messages a communicator carries.
enum class Reach : uint8_t { up, down, all };  // to higher ranks; to lower ones; and broadcasts

struct NcclLane {
  NcclUniqueId id;
  Reach reach = Reach::all;
  StreamHandle stream = nullptr;  // for connecting
};

// What one communicator does in a batch.
struct LaneMessages {
  int lane_idx = 0;
  StreamHandle stream = nullptr;
  std::vector<DeviceMessage> messages;
};

// Thread blocks of an operation on a lane that reaches up or down, unless the options say more.
// NCCL takes buffers for each of them and each peer, and they spin while they wait: many lanes with
// NCCL's own choice would take tens of GB and all multiprocessors.
inline constexpr int kLaneMaxCtas = 4;

// Calls that enqueue work come from one thread at a time; poll() and abort() from any. No later
// call waits for other ranks, so the communicators are blocking; non-blocking ones (the user has set
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

  // Collective: one communicator per lane, and in each the connections that its messages need, so
  // that no later call has to make one. Waits in NCCL until all ranks have come, even after abort():
  // for a thread that can be left behind. Throws NcclError, after which all is freed.
  void connect(std::span<const NcclLane> lanes, const NcclConfig& config);

  // These enqueue on streams. They throw NcclError, after which only abort() makes sense. All lanes
  // of a batch share the groups.
  void send_and_receive(std::span<const LaneMessages> lanes, const KeepWaiting& keep_waiting);
  void broadcast(int lane_idx, std::byte* data, int64_t num_bytes, int source, StreamHandle stream,
                 const KeepWaiting& keep_waiting);

  // Throws the asynchronous error of a communicator, if there is one. Never waits.
  void poll();

  // Makes all kernels in flight leave and frees everything. May take long if another thread hangs
  // in the CUDA driver, and does not return while a captured graph is alive. Leaves the rest to
  // connect() if that is under way. Idempotent.
  void abort();

  // For an orderly end, once nothing is in flight. Frees everything, but not before all captured
  // graphs are destroyed and all ranks of the node have called it: for a thread that can be left
  // behind.
  void finish();

 private:
  class GroupCalls;
  using Comms = std::span<NcclComm* const>;

  void require(const char* call, NcclResult result, NcclComm* comm) const;
  bool in_progress(const char* call, NcclComm* comm) const;
  void settle(const char* call, NcclResult result, Comms comms,
              const KeepWaiting& keep_waiting) const;
  void init(std::span<const NcclLane> lanes, const NcclConfig& config);
  void connect_pairs(std::span<const NcclLane> lanes);
  void enqueue(std::span<const LaneMessages> lanes, const KeepWaiting& keep_waiting);
  void enqueue_broadcast(int lane_idx, std::byte* data, int64_t num_bytes, int source,
                         StreamHandle stream, const KeepWaiting& keep_waiting);
  void check_alive() const;
  void abort_all();

  const NcclApi api_;
  const std::shared_ptr<DeviceRuntime> runtime_;
  const int rank_;
  const int size_;
  const int max_ops_per_group_;
  std::mutex calls_;                 // NCCL allows one call at a time on a communicator
  std::vector<NcclComm*> comms_;     // null once freed
  std::vector<NcclConfig> configs_;  // NCCL keeps pointers to the names
  std::atomic<bool> ended_{false};   // abort() or finish() has been called
  std::mutex connect_mutex_;
  bool connecting_ = false;  // under connect_mutex_
};

}  // namespace pipecomm
