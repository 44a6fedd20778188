// Order-sensitive 64-bit hash of the values on which two ranks must agree.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "plan/exchange_plan.h"

namespace pipecomm {

class Signature {
 public:
  Signature() = default;
  explicit Signature(std::string_view op) { add(op); }

  Signature& add(int64_t value);
  Signature& add(std::string_view text);
  Signature& add(std::span<const int64_t> values);
  Signature& add(DType dtype);
  Signature& add(const Scale& scale);

  uint64_t value() const { return state_; }

 private:
  uint64_t state_ = 0x9e3779b97f4a7c15u;
};

}  // namespace pipecomm
