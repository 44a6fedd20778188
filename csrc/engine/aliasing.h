// Whether the tensors of an exchange share memory in a way that would spoil its result.
#pragma once

#include <span>

#include "engine/point_to_point.h"
#include "plan/exchange_plan.h"

namespace pipecomm {

// Throws std::invalid_argument if two outputs share memory, or an output and an input do. An input
// may be this rank's own place in an output, as in an in-place gather, or a slice of an output into
// which nothing is received. Tensors with gaps between their elements may interleave; for them,
// only the first element is checked.
void check_aliasing(const ExchangePlan& plan, std::span<const TensorRef> inputs,
                    std::span<const TensorRef> outputs);

}  // namespace pipecomm
