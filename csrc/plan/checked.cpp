#include "plan/checked.h"

namespace pipecomm {

std::string to_string(const std::vector<int64_t>& values) {
  std::string text = "[";
  for (size_t i = 0; i < values.size(); ++i) {
    if (i > 0) text += ", ";
    text += std::to_string(values[i]);
  }
  return text + "]";
}

int64_t checked_sum(const std::vector<int64_t>& values) {
  int64_t sum = 0;
  for (int64_t value : values) sum = checked_add(sum, value);
  return sum;
}

int64_t checked_product(const std::vector<int64_t>& values) {
  // A zero anywhere makes the product zero, however large the factors before it are.
  for (int64_t value : values) {
    if (value == 0) return 0;
  }
  int64_t product = 1;
  for (int64_t value : values) product = checked_mul(product, value);
  return product;
}

}  // namespace pipecomm
