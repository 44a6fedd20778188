#include "engine/aliasing.h"

#include <stdexcept>
#include <string>

namespace pipecomm {
namespace {

struct Interval {
  const std::byte* begin = nullptr;
  const std::byte* end = nullptr;

  bool overlaps(const Interval& other) const { return begin < other.end && other.begin < end; }
  bool contains(const Interval& other) const { return begin <= other.begin && other.end <= end; }
};

// All bytes of a contiguous tensor, or the first element of a tensor with gaps.
Interval memory_of(const TensorRef& tensor) {
  const int64_t num_bytes = tensor.num_bytes();
  if (num_bytes == 0) return {};
  return {tensor.data, tensor.data + (tensor.is_contiguous() ? num_bytes : tensor.dtype.itemsize)};
}

// The bytes of a contiguous output that come from this rank itself, if they are one run.
Interval own_place(const ExchangePlan& plan, const TensorRef& output, int output_idx) {
  if (!output.is_contiguous()) return {};
  for (const Transfer& recv : plan.recvs) {
    if (recv.peer != plan.rank) continue;
    for (const Box& box : recv.boxes) {
      if (box.tensor_idx != output_idx) continue;
      // A run: full extent in all dims after the first one that has more than one element.
      size_t dim = 0;
      while (dim < box.extent.size() && box.extent[dim] == 1) ++dim;
      int64_t begin = 0, num_elements = 1;
      for (size_t idx = 0; idx < box.extent.size(); ++idx) {
        if (idx > dim && box.extent[idx] != output.shape[idx]) return {};
        begin += box.start[idx] * output.strides[idx];
        num_elements *= box.extent[idx];
      }
      const std::byte* first = output.data + begin * output.dtype.itemsize;
      return {first, first + num_elements * output.dtype.itemsize};
    }
  }
  return {};
}

// Whether an input is a slice of an output that receives nothing from other ranks, nor from this
// rank, unless it is exactly the slice that this rank sends to itself.
bool is_slice_that_stays(const ExchangePlan& plan, const TensorRef& input, const TensorRef& output,
                         int output_idx) {
  const size_t num_dims = output.shape.size();
  const int64_t offset_bytes = input.data - output.data;
  if (input.shape.size() != num_dims || offset_bytes < 0 ||
      offset_bytes % output.dtype.itemsize != 0)
    return false;
  int64_t offset = offset_bytes / output.dtype.itemsize;
  Dims start(num_dims, 0);
  for (size_t dim = 0; dim < num_dims; ++dim) {  // strides of a slice decrease
    if (output.shape[dim] == 1) continue;
    const int64_t stride = output.strides[dim];
    if (stride == 0 || (input.shape[dim] != 1 && input.strides[dim] != stride)) return false;
    start[dim] = offset / stride;
    offset %= stride;
    if (start[dim] + input.shape[dim] > output.shape[dim]) return false;
  }
  if (offset != 0) return false;
  for (const Transfer& recv : plan.recvs) {
    for (const Box& box : recv.boxes) {
      if (box.tensor_idx != output_idx) continue;
      if (recv.peer == plan.rank && box.start == start && box.extent == input.shape) continue;
      bool overlaps = true;
      for (size_t dim = 0; dim < num_dims; ++dim)
        overlaps &= start[dim] < box.start[dim] + box.extent[dim] &&
                    box.start[dim] < start[dim] + input.shape[dim];
      if (overlaps) return false;
    }
  }
  return true;
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
    const Interval memory = memory_of(outputs[idx]);
    for (size_t other = 0; other < idx; ++other)
      if (memory.overlaps(memory_of(outputs[other]))) reject(plan, "outputs", other, idx);
    for (size_t other = 0; other < inputs.size(); ++other) {
      const Interval read = memory_of(inputs[other]);
      if (memory.overlaps(read) &&
          !own_place(plan, outputs[idx], static_cast<int>(idx)).contains(read) &&
          !is_slice_that_stays(plan, inputs[other], outputs[idx], static_cast<int>(idx)))
        reject(plan, "inputs", other, idx);
    }
  }
}

}  // namespace pipecomm
