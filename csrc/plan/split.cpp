#include "plan/split.h"

#include <stdexcept>
#include <string>

namespace pipecomm {

namespace {

void require_world_size(int world_size) {
  if (world_size < 1) {
    throw std::invalid_argument("world size must be at least 1, got " + std::to_string(world_size));
  }
}

void require_length(int64_t dim_size) {
  if (dim_size < 0) {
    throw std::invalid_argument("a length must not be negative, got " + std::to_string(dim_size));
  }
}

}  // namespace

Sizes remainder_first(int64_t dim_size, int world_size) {
  require_world_size(world_size);
  require_length(dim_size);
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

std::pair<int, int> zigzag_chunks(int rank, int world_size) {
  return {rank, 2 * world_size - 1 - rank};
}

int64_t zigzag_chunk_size(int64_t dim_size, int world_size) {
  require_world_size(world_size);
  require_length(dim_size);
  const int64_t num_chunks = 2 * int64_t{world_size};
  if (dim_size % num_chunks != 0) {
    throw std::invalid_argument(
        "zigzag order needs a length divisible by 2 * group size = " + std::to_string(num_chunks) +
        ", got length " + std::to_string(dim_size));
  }
  return dim_size / num_chunks;
}

}  // namespace pipecomm
