#include "engine/whole_copies.h"

#include <cstdint>

#include "plan/lower.h"

namespace pipecomm {
namespace {

TensorSpec spec_of(const TensorRef& tensor) { return {tensor.shape, tensor.dtype}; }
StridedLayout layout_of(const TensorRef& tensor) {
  return {tensor.shape, tensor.strides, tensor.dtype.itemsize};
}

}  // namespace

void WholeCopies::add(const TensorRef& from, const TensorRef& to) {
  add(spec_of(to), from.data, layout_of(from), to.data, layout_of(to));
}

void WholeCopies::add(const std::byte* from, const TensorRef& to) {
  add(spec_of(to), from, StridedLayout::contiguous(spec_of(to)), to.data, layout_of(to));
}

void WholeCopies::add(const TensorRef& from, std::byte* to) {
  add(spec_of(from), from.data, layout_of(from), to, StridedLayout::contiguous(spec_of(from)));
}

// The copies that a plan of one rank lowers to if the rank sends the tensor to itself.
void WholeCopies::add(const TensorSpec& spec, const std::byte* from,
                      const StridedLayout& from_layout, std::byte* to,
                      const StridedLayout& to_layout) {
  const Transfer whole{0, {Box{0, Dims(spec.shape.size(), 0), spec.shape}}};
  ExchangePlan plan;
  plan.op = "copy";
  plan.inputs = plan.outputs = {spec};
  plan.sends = plan.recvs = {whole};
  const LoweredExchange lowered = lower(plan, {from_layout}, {to_layout});
  for (CopyTask task : lowered.local()) {
    task.src_tensor_idx = task.dst_tensor_idx = static_cast<int32_t>(sources_.size());
    tasks_.push_back(task);
  }
  sources_.push_back(from);
  destinations_.push_back(to);
}

}  // namespace pipecomm
