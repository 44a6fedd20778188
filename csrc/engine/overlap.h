// Whether two tensors, of any strides, have memory in common.
#pragma once

#include "engine/point_to_point.h"

namespace pipecomm {

// The end of the memory that begins with the first element and ends with the last one; of a tensor without
// elements, its beginning.
const std::byte* end_of(const TensorRef& tensor);

// Exact, except that it gives up after many tries and says no: tensors in the gaps of each other, whose
// strides are no multiples of each other.
bool overlap(const TensorRef& a, const TensorRef& b);

}  // namespace pipecomm
