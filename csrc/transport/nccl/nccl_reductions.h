// The reductions that NCCL has, by the numbers that its functions take.
#pragma once

#include <optional>

#include "copy/reduce_cpu.h"
#include "plan/dtype.h"

namespace pipecomm {

// ncclDataType_t, of the dtypes that NCCL reduces.
constexpr std::optional<int> nccl_dtype(DType dtype) {
  if (dtype == dtypes::kInt8) return 0;
  if (dtype == dtypes::kUInt8) return 1;
  if (dtype == dtypes::kInt32) return 2;
  if (dtype == dtypes::kUInt32) return 3;
  if (dtype == dtypes::kInt64) return 4;
  if (dtype == dtypes::kUInt64) return 5;
  if (dtype == dtypes::kFloat16) return 6;
  if (dtype == dtypes::kFloat32) return 7;
  if (dtype == dtypes::kFloat64) return 8;
  if (dtype == dtypes::kBFloat16) return 9;
  return std::nullopt;
}

// ncclRedOp_t
constexpr std::optional<int> nccl_operator(Reduction reduction) {
  if (reduction == Reduction::kSum) return 0;
  if (reduction == Reduction::kProduct) return 1;
  if (reduction == Reduction::kMax) return 2;
  if (reduction == Reduction::kMin) return 3;
  if (reduction == Reduction::kMean) return 4;
  return std::nullopt;
}

// Means of floats, and the other operators of all these dtypes.
constexpr bool nccl_reduces(Reduction reduction, DType dtype) {
  const bool is_float = dtype == dtypes::kFloat16 || dtype == dtypes::kBFloat16 ||
                        dtype == dtypes::kFloat32 || dtype == dtypes::kFloat64;
  return nccl_dtype(dtype) && nccl_operator(reduction) &&
         (is_float || reduction != Reduction::kMean);
}

}  // namespace pipecomm
