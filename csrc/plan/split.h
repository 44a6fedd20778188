// How a dimension is divided among ranks.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "plan/checked.h"

namespace pipecomm {

// Lengths of `world_size` contiguous pieces of `dim_size`. With q, m = divmod(dim_size, world_size)
// the first m pieces have length q + 1 and the others q: (10, 4) -> [3, 3, 2, 2].
Sizes remainder_first(int64_t dim_size, int world_size);

// Where each piece starts, with the total as the last entry: [3, 2] -> [0, 3, 5].
Sizes offsets_of(const Sizes& sizes);

// The two of 2 * world_size equal chunks that `rank` holds in zigzag order: the chunks `rank` and
// 2 * world_size - 1 - rank.
std::pair<int, int> zigzag_chunks(int rank, int world_size);

// Length of one of the 2 * world_size zigzag chunks. Throws std::invalid_argument if `dim_size` is
// not divisible by their number.
int64_t zigzag_chunk_size(int64_t dim_size, int world_size);

}  // namespace pipecomm
