// How a dimension is divided among ranks.
#pragma once

#include <cstdint>

#include "plan/checked.h"

namespace pipecomm {

// Lengths of `world_size` contiguous pieces of `dim_size`. With q, m = divmod(dim_size, world_size)
// the first m pieces have length q + 1 and the others q: (10, 4) -> [3, 3, 2, 2].
Sizes remainder_first(int64_t dim_size, int world_size);

// Where each piece starts, with the total as the last entry: [3, 2] -> [0, 3, 5].
Sizes offsets_of(const Sizes& sizes);

}  // namespace pipecomm
