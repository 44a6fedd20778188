#include "engine/prepared_exchange.h"

#include <stdexcept>
#include <string>

#include "engine/aliasing.h"

namespace pipecomm {
namespace {

constexpr size_t kMaxEntries = 8;  // callers alternate between a few layouts at most

}  // namespace

std::shared_ptr<const LoweredExchange> PreparedExchange::lowered(
    const std::vector<StridedLayout>& inputs, const std::vector<StridedLayout>& outputs,
    bool all_staged) {
  std::vector<Dims> strides;
  strides.reserve(inputs.size() + outputs.size());
  for (const StridedLayout& layout : inputs) strides.push_back(layout.strides);
  for (const StridedLayout& layout : outputs) strides.push_back(layout.strides);
  {
    std::lock_guard lock(mutex_);
    for (const Entry& entry : entries_)
      if (entry.strides == strides && entry.all_staged == all_staged) return entry.lowered;
  }
  auto lowered = std::make_shared<const LoweredExchange>(lower(plan_, inputs, outputs, all_staged));
  std::lock_guard lock(mutex_);
  if (entries_.size() == kMaxEntries) entries_.erase(entries_.begin());
  entries_.push_back({std::move(strides), all_staged, lowered});
  return lowered;
}

std::shared_ptr<const LoweredExchange> PreparedExchange::lowered_for(
    int rank, int size, std::span<const TensorRef> inputs, std::span<const TensorRef> outputs,
    bool all_staged) {
  if (plan_.rank != rank || plan_.size != size)
    throw std::invalid_argument("the plan is for rank " + std::to_string(plan_.rank) + " of " +
                                std::to_string(plan_.size) + ", this is rank " +
                                std::to_string(rank) + " of " + std::to_string(size));
  auto layouts_of = [&](const char* what, std::span<const TensorRef> tensors,
                        const std::vector<TensorSpec>& specs) {
    if (tensors.size() != specs.size())
      throw std::invalid_argument(plan_.op + " takes " + std::to_string(specs.size()) + " " + what +
                                  ", got " + std::to_string(tensors.size()));
    std::vector<StridedLayout> layouts;
    for (size_t idx = 0; idx < tensors.size(); ++idx) {
      const TensorSpec actual{tensors[idx].shape, tensors[idx].dtype};
      if (actual != specs[idx])
        throw std::invalid_argument(plan_.op + ": " + what + "[" + std::to_string(idx) +
                                    "] must be " + to_string(specs[idx]) + ", not " +
                                    to_string(actual));
      layouts.push_back({actual.shape, tensors[idx].strides, actual.dtype.itemsize});
    }
    return layouts;
  };
  auto input_layouts = layouts_of("inputs", inputs, plan_.inputs);
  auto output_layouts = layouts_of("outputs", outputs, plan_.outputs);
  check_aliasing(plan_, inputs, outputs);
  return lowered(input_layouts, output_layouts, all_staged);
}

}  // namespace pipecomm
