// A plan with the copies that it lowers to, kept per combination of strides: lowered once, run many
// times.
#pragma once

#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "engine/point_to_point.h"
#include "plan/exchange_plan.h"
#include "plan/lower.h"

namespace pipecomm {

class PreparedExchange {
 public:
  // Throws std::invalid_argument if the plan is not valid.
  explicit PreparedExchange(ExchangePlan plan) : plan_(std::move(plan)) { plan_.validate(); }

  const ExchangePlan& plan() const { return plan_; }
  // For tensors of rank `rank` of `size`. Throws std::invalid_argument if the plan is not for that
  // rank, a tensor does not have the plan's shape and dtype, or outputs share memory.
  std::shared_ptr<const LoweredExchange> lowered_for(int rank, int size,
                                                     std::span<const TensorRef> inputs,
                                                     std::span<const TensorRef> outputs,
                                                     bool all_staged = false);

 private:
  std::shared_ptr<const LoweredExchange> lowered(std::span<const TensorRef> inputs,
                                                 std::span<const TensorRef> outputs,
                                                 bool all_staged);

  struct Entry {
    std::vector<Dims> strides;  // of inputs, then outputs
    bool all_staged;
    std::shared_ptr<const LoweredExchange> lowered;
  };

  const ExchangePlan plan_;
  std::mutex mutex_;
  std::vector<Entry> entries_;
};

using PreparedExchangePtr = std::shared_ptr<PreparedExchange>;

}  // namespace pipecomm
