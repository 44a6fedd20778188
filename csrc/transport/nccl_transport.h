// Moves bytes between devices with NCCL: one communicator per message order, since NCCL has no
// tags; groups of bounded size in rounds that both ends compute alike; errors found by polling.
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
#include "engine/operation.h"
#include "transport/nccl_api.h"
#include "transport/nccl_rounds.h"

namespace pipecomm {

class NcclError : public std::runtime_error {
 public:
  NcclError(NcclResult result, const std::string& text)
      : std::runtime_error(text), result_(result) {}
  NcclResult result() const { return result_; }

 private:
  NcclResult result_;
};

// Calls that enqueue work come from one thread at a time; poll() and abort() from any.
class NcclTransport {
 public:
  // Asked whenever a call has to wait for NCCL; ends the wait by throwing.
  using KeepWaiting = std::function<void()>;

  NcclTransport(const NcclApi& api, std::shared_ptr<DeviceRuntime> runtime, int rank, int size,
                int max_ops_per_group);
  ~NcclTransport();
  NcclTransport(const NcclTransport&) = delete;
  NcclTransport& operator=(const NcclTransport&) = delete;

  // Collective: one communicator per id, and a connection between every pair of ranks in each, so
  // that no later call has to make one.
  void connect(std::span<const NcclUniqueId> ids, const NcclConfig& config,
               const KeepWaiting& keep_waiting);

  // Enqueue on `stream`. Throw NcclError, after which only abort() makes sense.
  void exchange(int comm_idx, std::span<const DeviceMessage> messages, StreamHandle stream,
                const KeepWaiting& keep_waiting);
  void broadcast(int comm_idx, std::byte* data, int64_t num_bytes, int source, StreamHandle stream,
                 const KeepWaiting& keep_waiting);

  // Throws the asynchronous error of a communicator, if there is one. Never waits.
  void poll();

  // Makes all kernels in flight leave and frees everything. May take long if another thread is
  // stuck in the CUDA driver. Idempotent.
  void abort();

  // Orderly end once nothing is in flight: flushes and frees, or aborts when the deadline passes.
  void close(Deadline deadline);

 private:
  class Group;

  void require(const char* call, NcclResult result, NcclComm* comm) const;
  void settle(const char* call, NcclResult result, NcclComm* comm,
              const KeepWaiting& keep_waiting) const;
  void enqueue(NcclComm* comm, std::span<const DeviceMessage> messages, StreamHandle stream,
               const KeepWaiting& keep_waiting);
  void abort_all();

  const NcclApi& api_;
  const std::shared_ptr<DeviceRuntime> runtime_;
  const int rank_;
  const int size_;
  const int max_ops_per_group_;
  std::mutex calls_;  // NCCL allows one call at a time on a communicator
  std::vector<NcclComm*> comms_;
  std::atomic<bool> ended_{false};  // abort() or close() has been called
};

}  // namespace pipecomm
