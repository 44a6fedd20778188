// Whether the tensors of an exchange share memory in a way that would spoil its result.
#pragma once

#include <span>

#include "engine/point_to_point.h"
#include "plan/exchange_plan.h"

namespace pipecomm {

// Throws std::invalid_argument if two outputs share memory, or an input lies where this rank writes
// into an output. What it sends to itself may lie at its place there, as in an in-place gather.
// Tensors with gaps between their elements may interleave.
void check_aliasing(const ExchangePlan& plan, std::span<const TensorRef> inputs,
                    std::span<const TensorRef> outputs);

}  // namespace pipecomm
