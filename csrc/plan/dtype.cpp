#include "plan/dtype.h"

#include <iterator>

namespace pipecomm {

namespace {

// Append only: the numbers are sent to other ranks.
// clang-format off
constexpr const char* kNames[] = {
    "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64", "complex32",
    "complex64", "complex128", "bool", "qint8", "quint8", "qint32", "bfloat16", "quint4x2",
    "quint2x4", "bits1x8", "bits2x4", "bits4x2", "bits8", "bits16", "float8_e5m2", "float8_e4m3fn",
    "float8_e5m2fnuz", "float8_e4m3fnuz", "uint16", "uint32", "uint64", "uint1", "uint2", "uint3",
    "uint4", "uint5", "uint6", "uint7", "int1", "int2", "int3", "int4", "int5", "int6", "int7",
    "float8_e8m0fnu", "float4_e2m1fn_x2", "bcomplex32"};
// clang-format on

}  // namespace

int num_dtypes() { return static_cast<int>(std::size(kNames)); }

const char* dtype_name(uint8_t code) {
  return code < std::size(kNames) ? kNames[code] : "unknown dtype";
}

Arithmetic arithmetic_of(DType dtype) {
  if (dtype == dtypes::kFloat16) return Arithmetic::kFloat16;
  if (dtype == dtypes::kBFloat16) return Arithmetic::kBFloat16;
  if (dtype == dtypes::kFloat32) return Arithmetic::kFloat32;
  if (dtype == dtypes::kFloat64) return Arithmetic::kFloat64;
  return Arithmetic::kBytes;
}

}  // namespace pipecomm
