// 64-bit arithmetic on sizes that refuses to wrap around.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace pipecomm {

using Dims = std::vector<int64_t>;   // a shape or a position, in elements
using Sizes = std::vector<int64_t>;  // one length per rank or per sequence, in elements

// "[2, 3, 5]", as error messages show shapes and sizes.
std::string to_string(const std::vector<int64_t>& values);

inline int64_t checked_add(int64_t a, int64_t b) {
  int64_t sum;
  if (__builtin_add_overflow(a, b, &sum)) {
    throw std::invalid_argument("size overflow: " + std::to_string(a) + " + " + std::to_string(b) +
                                " exceeds 64 bits");
  }
  return sum;
}

inline int64_t checked_mul(int64_t a, int64_t b) {
  int64_t product;
  if (__builtin_mul_overflow(a, b, &product)) {
    throw std::invalid_argument("size overflow: " + std::to_string(a) + " * " + std::to_string(b) +
                                " exceeds 64 bits");
  }
  return product;
}

inline int64_t checked_align_up(int64_t value, int64_t alignment) {
  return checked_add(value, alignment - 1) / alignment * alignment;
}

int64_t checked_sum(const std::vector<int64_t>& values);
int64_t checked_product(const std::vector<int64_t>& values);  // 1 for no values

}  // namespace pipecomm
