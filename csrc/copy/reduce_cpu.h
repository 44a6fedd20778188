// Reductions of tensors in host memory, element by element.
#pragma once

#include <cstdint>
#include <span>

#include "plan/dtype.h"

namespace pipecomm {

// Of bool, a sum is "any", a product "all".
enum class Reduction : uint8_t {
  kSum,
  kMean,
  kProduct,
  kMin,
  kMax,
  kBitAnd,
  kBitOr,
  kBitXor,
};

// Whether reduce_cpu supports it: means of floats, bitwise reductions of integers and bool, and the others
// of all these; no complex numbers, and no floats of 8 bits.
bool can_reduce(Reduction reduction, DType dtype);

// dst[i] = srcs[0][i] op srcs[1][i] op ..., in this order: fp16 and bf16 in fp32, all others in their own
// type, in which integers wrap. A mean is the sum divided by the number of sources. The minimum and the
// maximum of NaN and a number are NaN. dst may be one of the sources; then, and if it overlaps none, this is
// one pass over memory. Throws std::invalid_argument without sources, or if the reduction is not supported.
void reduce_cpu(Reduction reduction, void* dst, std::span<const void* const> srcs, int64_t count,
                DType dtype);

}  // namespace pipecomm
