// How a host moves the data of operations: copies into messages, messages of a HostTransport, copies
// out of them. Tensors in host memory travel as they lie where that is possible; those of a device
// are staged (HostStaging). It knows nothing of the order of calls, of deadlines and of failures:
// the Communicator does.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "copy/device_runtime.h"
#include "copy/thread_pool.h"
#include "engine/host_staging.h"
#include "engine/peer_messages.h"
#include "engine/point_to_point.h"
#include "engine/staging.h"
#include "message/message_copy.h"

namespace pipecomm {

// Bytes and passes that exchanges of this communicator have copied, for tests and benchmarks.
struct CopyCounters {
  int64_t num_exchanges = 0;
  int64_t num_passes = 0;
  int64_t num_staging_allocations = 0;
};

class HostExchange;

class HostExecution {
 public:
  // `device`: where the tensors are; null: in host memory.
  HostExecution(int rank, int num_threads, const std::shared_ptr<DeviceRuntime>& device);

  bool is_on_device() const { return staging_ != nullptr; }
  // What the caller's stream holds, which copies of a device follow; null in host memory.
  EventPtr work_of_caller(OpCode op);
  // Returns once `caller` is done, or with what `keep_waiting` throws.
  void wait(const EventPtr& caller, const std::function<void()>& keep_waiting);
  void copy(std::span<const CopyTask> tasks, const CopyBuffers& buffers, const Scale& scale);

  // Tensors of a device: in which memory they travel, and the copies before and after. Null in host
  // memory, where they travel as they lie; messages to oneself are then copied here.
  std::shared_ptr<StagedBatch> stage(std::span<const PointToPoint> batch, const OwnMessages& own);
  std::shared_ptr<HostExchange> exchange(std::shared_ptr<const LoweredExchange> lowered,
                                         std::span<const TensorRef> inputs,
                                         std::span<const TensorRef> outputs,
                                         bool copies_on_the_way);

  CopyCounters copy_counters() const {
    return {num_exchanges_, num_passes_, pool_.num_allocations()};
  }

 private:
  friend HostExchange;

  const int rank_;
  const std::unique_ptr<HostStaging> staging_;
  StagingPool pool_;
  ThreadPool threads_;
  std::mutex threads_mutex_;
  std::atomic<int64_t> num_exchanges_{0};
  std::atomic<int64_t> num_passes_{0};
};

// The copies and messages of one exchange. Messages lie in staging memory unless they are in one
// piece in a tensor, or the transport packs and unpacks them on the way.
class HostExchange : public std::enable_shared_from_this<HostExchange> {
 public:
  HostExchange(HostExecution& execution, std::shared_ptr<const LoweredExchange> lowered,
               bool stages)
      : execution_(execution), lowered_(std::move(lowered)), stages_(stages) {}

  void take_memory();
  // The copies that precede the messages.
  void begin();
  // Those that follow them; the memory goes back.
  void end();
  // The receives, then the sends.
  std::vector<RequestPtr> requests(std::span<const PeerMessages> messages);
  const LoweredExchange& lowered() const { return *lowered_; }

 private:
  friend HostExecution;
  RequestPtr request(Direction direction, int peer, const Descriptor& descriptor,
                     const LoweredMessage* message);

  HostExecution& execution_;
  const std::shared_ptr<const LoweredExchange> lowered_;
  const bool stages_;
  ExchangeBuffers buffers_;
};

}  // namespace pipecomm
