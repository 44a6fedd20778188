#include "plan/split.h"

#include <stdexcept>
#include <string>

namespace pipecomm {

Sizes remainder_first(int64_t dim_size, int world_size) {
  if (world_size < 1) {
    throw std::invalid_argument("world size must be at least 1, got " + std::to_string(world_size));
  }
  if (dim_size < 0) {
    throw std::invalid_argument("a length must not be negative, got " + std::to_string(dim_size));
  }
  const int64_t quotient = dim_size / world_size;
  const int64_t remainder = dim_size % world_size;
  Sizes sizes(world_size, quotient);
  for (int64_t i = 0; i < remainder; ++i) ++sizes[i];
  return sizes;
}

Sizes offsets_of(const Sizes& sizes) {
  Sizes offsets(sizes.size() + 1, 0);
  for (size_t i = 0; i < sizes.size(); ++i) offsets[i + 1] = checked_add(offsets[i], sizes[i]);
  return offsets;
}

}  // namespace pipecomm
