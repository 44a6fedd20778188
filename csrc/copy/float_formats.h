// fp16 and bf16 as bits: conversion from and to fp32, rounding to nearest even. The host code has no
// branches, so that loops over it vectorise for any instruction set.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#define PIPECOMM_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define PIPECOMM_HOST_DEVICE inline
#endif

namespace pipecomm {

PIPECOMM_HOST_DEVICE uint32_t float_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

PIPECOMM_HOST_DEVICE float float_from_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

// A format: the type of an element in memory, the type for arithmetic, and conversions between
// them.
struct Float16 {
  using Storage = uint16_t;
  using Compute = float;

  static PIPECOMM_HOST_DEVICE float load(uint16_t half) {
#ifdef __CUDA_ARCH__
    return __half2float(__ushort_as_half(half));
#else
    constexpr uint32_t kRebias = (127u - 15u) << 23;
    const uint32_t sign = (half & 0x8000u) << 16;
    const uint32_t magnitude = half & 0x7fffu;
    const uint32_t normal = (magnitude << 13) + kRebias;
    const uint32_t special = normal + kRebias;  // infinity and NaN: the largest exponent again
    // A subnormal is a multiple of 2^-24, the step of floats in [0.5, 1).
    const uint32_t subnormal = float_bits(float_from_bits(0x3f000000u | magnitude) - 0.5f);
    const uint32_t finite = magnitude < 0x0400u ? subnormal : normal;
    return float_from_bits(sign | (magnitude >= 0x7c00u ? special : finite));
#endif
  }

  static PIPECOMM_HOST_DEVICE uint16_t store(float value) {
#ifdef __CUDA_ARCH__
    return __half_as_ushort(__float2half_rn(value));
#else
    constexpr uint32_t kRebias = (127u - 15u) << 23;
    const uint32_t bits = float_bits(value);
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const uint32_t magnitude = bits & 0x7fffffffu;
    const uint32_t normal = (magnitude - kRebias + 0x0fffu + ((magnitude >> 13) & 1u)) >> 13;
    const uint32_t subnormal = float_bits(float_from_bits(magnitude) + 0.5f) - 0x3f000000u;
    const uint32_t special = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
    const uint32_t finite = magnitude < 0x38800000u ? subnormal : normal;  // below 2^-14
    return static_cast<uint16_t>(sign | (magnitude >= 0x47800000u ? special : finite));
#endif
  }
};

struct BFloat16 {
  using Storage = uint16_t;
  using Compute = float;

  static PIPECOMM_HOST_DEVICE float load(uint16_t bits) {
    return float_from_bits(static_cast<uint32_t>(bits) << 16);
  }

  static PIPECOMM_HOST_DEVICE uint16_t store(float value) {
#ifdef __CUDA_ARCH__
    return __bfloat16_as_ushort(__float2bfloat16_rn(value));
#else
    const uint32_t bits = float_bits(value);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
#endif
  }
};

struct Float32 {
  using Storage = float;
  using Compute = float;
  static PIPECOMM_HOST_DEVICE float load(float value) { return value; }
  static PIPECOMM_HOST_DEVICE float store(float value) { return value; }
};

struct Float64 {
  using Storage = double;
  using Compute = double;
  static PIPECOMM_HOST_DEVICE double load(double value) { return value; }
  static PIPECOMM_HOST_DEVICE double store(double value) { return value; }
};

}  // namespace pipecomm
