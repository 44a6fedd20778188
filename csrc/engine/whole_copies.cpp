#include "engine/whole_copies.h"

#include <cstdint>

#include "plan/lower.h"

namespace pipecomm {
namespace {

StridedLayout layout_of(const TensorRef& tensor) {
  return {tensor.shape, tensor.strides, tensor.dtype.itemsize};
}

}  // namespace

TensorRef contiguous_at(std::byte* data, const TensorRef& like) {
  const auto layout = StridedLayout::contiguous({like.shape, like.dtype});
  return {data, like.dtype, like.shape, layout.strides, like.storage};
}

// The copies that a plan of one rank lowers to if the rank sends the tensor to itself.
void WholeCopies::add(const TensorRef& from, const TensorRef& to) {
  const TensorSpec spec{to.shape, to.dtype};
  const Transfer whole{0, {Box{0, Dims(spec.shape.size(), 0), spec.shape}}};
  ExchangePlan plan;
  plan.op = "copy";
  plan.inputs = plan.outputs = {spec};
  plan.sends = plan.recvs = {whole};
  const LoweredExchange lowered = lower(plan, {layout_of(from)}, {layout_of(to)});
  for (CopyTask task : lowered.local()) {
    task.src_tensor_idx = task.dst_tensor_idx = static_cast<int32_t>(sources_.size());
    tasks_.push_back(task);
  }
  sources_.push_back(from.data);
  destinations_.push_back(to.data);
}

}  // namespace pipecomm
