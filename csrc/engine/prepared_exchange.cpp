#include "engine/prepared_exchange.h"

#include <stdexcept>
#include <string>

#include "engine/aliasing.h"

namespace pipecomm {
namespace {

constexpr size_t kMaxEntries = 8;  // callers alternate between a few layouts at most

}  // namespace

std::shared_ptr<const LoweredExchange> PreparedExchange::lowered(std::span<const TensorRef> inputs,
                                                                 std::span<const TensorRef> outputs,
                                                                 bool all_staged) {
  const auto has_strides_of = [&](const Entry& entry) {
    size_t idx = 0;
    for (const auto tensors : {inputs, outputs})
      for (const TensorRef& tensor : tensors)
        if (!(tensor.strides == entry.strides[idx++])) return false;
    return true;
  };
  {
    std::lock_guard lock(mutex_);
    for (const Entry& entry : entries_)
      if (entry.all_staged == all_staged && has_strides_of(entry)) return entry.lowered;
  }
  std::vector<StridedLayout> layouts[2];
  Entry entry{{}, all_staged, nullptr};
  for (const bool is_output : {false, true}) {
    for (const TensorRef& tensor : is_output ? outputs : inputs) {
      layouts[is_output].push_back({tensor.shape, tensor.strides, tensor.dtype.itemsize});
      entry.strides.push_back(tensor.strides);
    }
  }
  entry.lowered =
      std::make_shared<const LoweredExchange>(lower(plan_, layouts[0], layouts[1], all_staged));
  std::lock_guard lock(mutex_);
  if (entries_.size() == kMaxEntries) entries_.erase(entries_.begin());
  return entries_.emplace_back(std::move(entry)).lowered;
}

std::shared_ptr<const LoweredExchange> PreparedExchange::lowered_for(
    int rank, int size, std::span<const TensorRef> inputs, std::span<const TensorRef> outputs,
    bool all_staged) {
  if (plan_.rank != rank || plan_.size != size)
    throw std::invalid_argument("the plan is for rank " + std::to_string(plan_.rank) + " of " +
                                std::to_string(plan_.size) + ", this is rank " +
                                std::to_string(rank) + " of " + std::to_string(size));
  const auto check = [&](const char* what, std::span<const TensorRef> tensors,
                         const std::vector<TensorSpec>& specs) {
    if (tensors.size() != specs.size())
      throw std::invalid_argument(plan_.op + " takes " + std::to_string(specs.size()) + " " + what +
                                  ", got " + std::to_string(tensors.size()));
    for (size_t idx = 0; idx < tensors.size(); ++idx) {
      const TensorRef& tensor = tensors[idx];
      if (tensor.shape == specs[idx].shape && tensor.dtype == specs[idx].dtype) continue;
      throw std::invalid_argument(plan_.op + ": " + what + "[" + std::to_string(idx) +
                                  "] must be " + to_string(specs[idx]) + ", not " +
                                  to_string(TensorSpec{tensor.shape, tensor.dtype}));
    }
  };
  check("inputs", inputs, plan_.inputs);
  check("outputs", outputs, plan_.outputs);
  check_aliasing(plan_, inputs, outputs);
  return lowered(inputs, outputs, all_staged);
}

}  // namespace pipecomm
