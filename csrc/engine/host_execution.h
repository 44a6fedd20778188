// Moves the data of operations by host messages: copies into messages, messages of the
// HostTransport, copies out of them. Tensors in host memory are sent in place where possible; those
// of a device are staged (HostStaging).
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <span>

#include "copy/device_runtime.h"
#include "copy/thread_pool.h"
#include "engine/dispatch.h"
#include "engine/execution.h"
#include "engine/host_staging.h"
#include "engine/peer_messages.h"
#include "engine/point_to_point.h"
#include "engine/staging.h"
#include "message/message_copy.h"

namespace pipecomm {

class HostExchange;

class HostExecution final : public Execution {
 public:
  explicit HostExecution(Dispatch& dispatch);

  OperationPtr batch_p2p(std::span<const PointToPoint> batch, CallOptions options) override;
  bool stages_all() const override { return staging_ != nullptr; }
  OperationPtr exchange(const ExchangeCall& call, CallOptions options) override;
  OperationPtr broadcast(const TensorRef& tensor, int source, CallOptions options) override;
  OperationPtr barrier(bool is_async) override { return dispatch_.post_barrier(is_async); }
  OperationPtr refuse(OpCode op, const std::string& reason, const Scope& scope) override {
    return dispatch_.post_refusal(op, reason, scope);
  }
  bool poll(Operation& operation) override {
    if (!operation.done()) dispatch_.transport().advance();
    return operation.done();
  }
  bool assist(Operation& operation) override { return dispatch_.transport().assist(operation); }
  CopyCounters copy_counters() const override {
    return {num_exchanges_, num_passes_, pool_.num_allocations()};
  }

 private:
  friend HostExchange;

  void copy(std::span<const CopyTask> tasks, const CopyBuffers& buffers, const Scale& scale);
  // An event after the caller's work, which device copies wait for; null for host memory.
  EventPtr work_of_caller(OpCode op);
  std::shared_ptr<StagedBatch> stage(Operation& operation, std::span<const PointToPoint> batch,
                                     const OwnMessages& own);
  void begin_exchange(Operation& operation, const EventPtr& caller, HostExchange& exchange);
  void before_posting(const Operation& operation, const EventPtr& caller,
                      const std::function<void()>& copy);

  Dispatch& dispatch_;
  const std::unique_ptr<HostStaging> staging_;
  StagingPool pool_;
  ThreadPool threads_;
  std::mutex threads_mutex_;
  std::atomic<int64_t> num_exchanges_{0};
  std::atomic<int64_t> num_passes_{0};
};

// The copies and messages of one exchange. Messages are in staging memory unless they are in one
// piece in a tensor, or the transport packs and unpacks them on the way.
class HostExchange : public std::enable_shared_from_this<HostExchange> {
 public:
  HostExchange(HostExecution& execution, const ExchangeCall& call, bool stages_messages);

  void take_memory();
  // The copies that precede the messages.
  void begin();
  // The copies that follow the messages; then returns the staging memory.
  void end();
  // The receives, then the sends; a message without data is described as `empty`.
  RequestList requests(const Descriptor& empty, std::span<const int> peers);

  const std::shared_ptr<const LoweredExchange> lowered;
  const bool stages;  // messages in staging memory

 private:
  RequestPtr request(Direction direction, int peer, const Descriptor& descriptor,
                     const LoweredMessage* message);

  HostExecution& execution_;
  ExchangeBuffers buffers_;
};

}  // namespace pipecomm
