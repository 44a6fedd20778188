// Element types as the plan layer sees them: a number and a size in bytes.
#pragma once

#include <cstdint>

namespace pipecomm {

// `code` is the number of torch's ScalarType, which is part of its stable ABI.
struct DType {
  uint8_t code = 0;
  uint8_t itemsize = 1;

  bool operator==(const DType&) const = default;
};

namespace dtypes {
inline constexpr DType kUInt8{0, 1};
inline constexpr DType kInt8{1, 1};
inline constexpr DType kInt16{2, 2};
inline constexpr DType kInt32{3, 4};
inline constexpr DType kInt64{4, 8};
inline constexpr DType kFloat16{5, 2};
inline constexpr DType kFloat32{6, 4};
inline constexpr DType kFloat64{7, 8};
inline constexpr DType kComplex128{10, 16};
inline constexpr DType kBool{11, 1};
inline constexpr DType kBFloat16{15, 2};
inline constexpr DType kUInt16{27, 2};
inline constexpr DType kUInt32{28, 4};
inline constexpr DType kUInt64{29, 8};
}  // namespace dtypes

// The name as torch prints it without the prefix "torch.": "bfloat16", "float8_e4m3fn", ...
const char* dtype_name(uint8_t code);
int num_dtypes();  // codes below that have a name

// How a copy treats the elements it moves: as plain bytes, or as numbers to be scaled.
enum class Arithmetic : uint8_t { kBytes, kFloat16, kBFloat16, kFloat32, kFloat64 };

// The arithmetic of the four types that can be scaled and averaged, kBytes for every other type.
Arithmetic arithmetic_of(DType dtype);

}  // namespace pipecomm
