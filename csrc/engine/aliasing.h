// Whether the tensors of an exchange share memory in a way that would spoil its result.
#pragma once

#include <span>

#include "engine/point_to_point.h"
#include "plan/exchange_plan.h"

namespace pipecomm {

// Throws std::invalid_argument if two outputs share memory, or an output and an input do. Legal is
// an input that is its own place in an output, as in a gather in place, or a slice of it into which
// nothing is received. Tensors with gaps between their elements may interleave; of those only a
// common first element is noticed.
void check_aliasing(const ExchangePlan& plan, std::span<const TensorRef> inputs,
                    std::span<const TensorRef> outputs);

}  // namespace pipecomm
