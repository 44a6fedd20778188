// The effect of scaling on one element, by the compiler's own _Float16 and by exact rounding of
// bf16.
#pragma once

#include "world.h"

namespace scaling {

// The nearest bf16 by search among the two neighbours, ties to even.
inline uint16_t nearest_bfloat16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if (std::isnan(value)) return 0x7fc0;
  const auto low = uint16_t(bits >> 16);
  const uint32_t rest = bits & 0xffffu;
  if (rest < 0x8000u) return low;
  if (rest > 0x8000u) return low + 1;
  return low + (low & 1);
}

inline float bfloat16_value(uint16_t half) {
  const uint32_t bits = uint32_t{half} << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

template <typename T>
T scaled(T value, const Scale& scale) {
  const T factor = static_cast<T>(scale.factor);
  return scale.kind == Scale::Kind::kMultiply ? value * factor : value / factor;
}

template <typename T, typename Wide = T>
void scale_as(uint8_t* element, const Scale& scale) {
  T value;
  std::memcpy(&value, element, sizeof value);
  value = static_cast<T>(scaled(static_cast<Wide>(value), scale));
  std::memcpy(element, &value, sizeof value);
}

inline void scale_element(uint8_t* element, DType dtype, const Scale& scale) {
  if (dtype == dtypes::kFloat16) return scale_as<_Float16, float>(element, scale);
  if (dtype == dtypes::kFloat32) return scale_as<float>(element, scale);
  if (dtype == dtypes::kFloat64) return scale_as<double>(element, scale);
  uint16_t half;
  std::memcpy(&half, element, 2);
  half = nearest_bfloat16(scaled(bfloat16_value(half), scale));
  std::memcpy(element, &half, 2);
}

// The effect of an exchange with this scale on its elements.
inline world::Transform transform_of(const Scale& scale) {
  if (scale.is_none()) return nullptr;
  return [scale](uint8_t* element, DType dtype) { scale_element(element, dtype, scale); };
}

}  // namespace scaling
