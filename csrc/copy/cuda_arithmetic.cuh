// Arithmetic on the elements of a vector, bit-identical to the host's.
#pragma once

#include <cmath>

#include "copy/cuda_vectors.cuh"
#include "copy/float_formats.h"
#include "plan/exchange_plan.h"

namespace pipecomm {

// Multiplies numbers by a factor, or divides them by a divisor without a division for each: by a
// product with the reciprocal, which is off by a rounding or two, and a correction by the remainder,
// which fma computes exactly. The result is the rounded quotient unless an intermediate value over- or
// underflows; such numbers are divided.
template <typename T>
class Scaling {
 public:
  explicit Scaling(const Scale& scale)
      : divisor_(static_cast<T>(scale.factor)), is_division_(scale.kind == Scale::Kind::kDivide) {
    factor_ = is_division_ ? 1 / divisor_ : divisor_;
    int exponent = 0;
    if (std::abs(std::frexp(divisor_, &exponent)) == T{0.5} && std::isfinite(factor_))
      is_division_ = false;  // by a power of two: the product is the quotient
    if (std::abs(divisor_) < 1 / kMaxDivisor || std::abs(divisor_) > kMaxDivisor) largest_ = -1;
  }

  template <int kCount>
  __device__ __forceinline__ void operator()(T (&values)[kCount]) const {
    if (!is_division_) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) values[i] *= factor_;
      return;
    }
    bool can_correct = true;
#pragma unroll
    for (int i = 0; i < kCount; ++i) can_correct &= is_correctable(values[i]);
    if (can_correct) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) values[i] = corrected_quotient(values[i]);
    } else {
      divide(values);
    }
  }

 private:
  // The remainder of such numbers by such divisors is no less than the smallest subnormal number.
  static constexpr T kSmallest = sizeof(T) == 4 ? T{0x1p-100} : static_cast<T>(0x1p-900);
  static constexpr T kMaxDivisor = T{0x1p20};

  // Rare, so compact code: each value in turn is divided in the first slot, then moves to the last.
  template <int kCount>
  __device__ __forceinline__ void divide(T (&values)[kCount]) const {
#pragma unroll 1
    for (int turn = 0; turn < kCount; ++turn) {
      const T quotient = values[0] / divisor_;
#pragma unroll
      for (int i = 1; i < kCount; ++i) values[i - 1] = values[i];
      values[kCount - 1] = quotient;
    }
  }

  __device__ __forceinline__ bool is_correctable(T value) const {
    const T magnitude = value < 0 ? -value : value;
    return magnitude <= largest_ && (magnitude >= kSmallest || magnitude == 0);
  }
  __device__ __forceinline__ T corrected_quotient(T value) const {
    const T quotient = value * factor_;
    const T remainder = fma(-quotient, divisor_, value);
    return remainder == 0 ? quotient : fma(remainder, factor_, quotient);  // keeps the sign of 0
  }

  T divisor_, factor_, largest_ = 1 / kSmallest;
  bool is_division_;
};

struct Identity {
  template <typename Vector>
  __device__ __forceinline__ Vector operator()(Vector vector) const {
    return vector;
  }
};

template <typename Format>
struct ScaleVector {
  Scaling<typename Format::Compute> scaling;

  template <typename Vector>
  __device__ __forceinline__ Vector operator()(Vector vector) const {
    constexpr int kCount = sizeof(Vector) / sizeof(typename Format::Storage);
    typename Format::Storage elements[kCount];
    typename Format::Compute values[kCount];
    memcpy(elements, &vector, sizeof(vector));
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[i] = Format::load(elements[i]);
    scaling(values);
#pragma unroll
    for (int i = 0; i < kCount; ++i) elements[i] = Format::store(values[i]);
    memcpy(&vector, elements, sizeof(vector));
    return vector;
  }
};

}  // namespace pipecomm
