// Vectors of 16 to 1 bytes in device memory, and 16 bytes at any address.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace pipecomm {

template <int kBytes>
struct VectorOf;
template <>
struct VectorOf<16> {
  using Type = uint4;
};
template <>
struct VectorOf<8> {
  using Type = uint2;
};
template <>
struct VectorOf<4> {
  using Type = uint32_t;
};
template <>
struct VectorOf<2> {
  using Type = uint16_t;
};
template <>
struct VectorOf<1> {
  using Type = uint8_t;
};

// Without a caching hint: the neighbouring bytes belong to other boxes, whose blocks run at the same
// time (with ld.cs runs of 128 B are a tenth slower on an H100).
template <typename Vector>
__device__ __forceinline__ Vector load_vector(const void* address) {
  return *static_cast<const Vector*>(address);
}

// For memory that no other block reads: whole vectors are marked as read once (ld.cs).
template <typename Vector>
__device__ __forceinline__ Vector load_once(const void* address) {
  const auto* vector = static_cast<const Vector*>(address);
  if constexpr (sizeof(Vector) == 16) return __ldcs(vector);
  return *vector;
}

// The aligned 16 bytes that `address` lies in, and the next ones. Neighbours read them as well.
struct TwoVectors {
  uint4 low, high;

  // The 16 bytes from `shift` on.
  __device__ __forceinline__ uint4 from(uint32_t shift) const {
    uint32_t words[] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int i = 0; i < 6; ++i) words[i] = shift & 8 ? words[i + 2] : words[i];
#pragma unroll
    for (int i = 0; i < 5; ++i) words[i] = shift & 4 ? words[i + 1] : words[i];
    const uint32_t bits = 8 * (shift & 3);
    return {__funnelshift_r(words[0], words[1], bits), __funnelshift_r(words[1], words[2], bits),
            __funnelshift_r(words[2], words[3], bits), __funnelshift_r(words[3], words[4], bits)};
  }
};

}  // namespace pipecomm
