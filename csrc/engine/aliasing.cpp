#include "engine/aliasing.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "engine/overlap.h"

namespace pipecomm {
namespace {

TensorRef part_of(const TensorRef& tensor, const Box& box) {
  TensorRef part{tensor.data, tensor.dtype, box.extent, tensor.strides, {}};
  for (size_t dim = 0; dim < box.start.size(); ++dim)
    part.data += box.start[dim] * tensor.strides[dim] * tensor.dtype.itemsize;
  return part;
}

// Whether both are the same elements of memory in the same order.
bool are_the_same(const TensorRef& a, const TensorRef& b) {
  if (a.data != b.data) return false;
  if (a.is_contiguous() && b.is_contiguous()) return true;
  if (a.shape != b.shape) return false;
  for (size_t dim = 0; dim < a.shape.size(); ++dim)
    if (a.shape[dim] != 1 && a.strides[dim] != b.strides[dim]) return false;
  return true;
}

// Whether a part of inputs[input_idx] lies where this rank writes into outputs[output_idx].
bool is_overwritten(const ExchangePlan& plan, std::span<const TensorRef> inputs, size_t input_idx,
                    std::span<const TensorRef> outputs, size_t output_idx) {
  for (const Transfer& recv : plan.recvs) {
    for (size_t idx = 0; idx < recv.boxes.size(); ++idx) {
      if (recv.boxes[idx].tensor_idx != static_cast<int>(output_idx)) continue;
      const TensorRef place = part_of(outputs[output_idx], recv.boxes[idx]);
      if (!overlap(place, inputs[input_idx])) continue;
      if (recv.peer != plan.rank || !plan.scale.is_none()) return true;
      // What this rank sends to itself may lie there already.
      const Box& from = std::ranges::find(plan.sends, plan.rank, &Transfer::peer)->boxes[idx];
      if (!are_the_same(part_of(inputs[from.tensor_idx], from), place)) return true;
    }
  }
  return false;
}

[[noreturn]] void reject(const ExchangePlan& plan, const std::string& a, size_t a_idx,
                         size_t b_idx) {
  throw std::invalid_argument(plan.op + ": " + a + "[" + std::to_string(a_idx) + "] and outputs[" +
                              std::to_string(b_idx) + "] share memory; use separate tensors");
}

}  // namespace

void check_aliasing(const ExchangePlan& plan, std::span<const TensorRef> inputs,
                    std::span<const TensorRef> outputs) {
  for (size_t idx = 0; idx < outputs.size(); ++idx) {
    for (size_t other = 0; other < idx; ++other)
      if (overlap(outputs[idx], outputs[other])) reject(plan, "outputs", other, idx);
    for (size_t other = 0; other < inputs.size(); ++other)
      if (overlap(outputs[idx], inputs[other]) && is_overwritten(plan, inputs, other, outputs, idx))
        reject(plan, "inputs", other, idx);
  }
}

}  // namespace pipecomm
