// Reductions of tensors in host memory that their caller waits for: exchanges, and one pass of arithmetic
// over what they bring. The bits are the same on all ranks and in every run: each element is computed from
// the same numbers in the order of the ranks, or by one rank.
#pragma once

#include <span>

#include "copy/reduce_cpu.h"
#include "engine/communicator.h"

namespace pipecomm {

// In place. With one plan, every rank gets the tensors of all other ones, in the order of the ranks with a
// gap for its own one, and reduces them itself. With two, it gets its piece of each (remainder_first) and
// reduces that; the second plan brings the pieces to all, in the order of `second`. `tensor` is contiguous.
void all_reduce(Communicator& communicator, const TensorRef& tensor, Reduction reduction,
                std::span<const PreparedExchangePtr> plans, const Scope& second,
                const Interrupted& interrupted);

// The contiguous tensors of all ranks, one after the other, into `output`.
void all_gather(Communicator& communicator, const TensorRef& output, const TensorRef& input,
                const PreparedExchangePtr& plan, const Interrupted& interrupted);

// This rank's piece of `input` of all ranks into `output`; `plan` brings those of the others. The pieces are
// equal in length. Both are contiguous.
void reduce_scatter(Communicator& communicator, const TensorRef& output, const TensorRef& input,
                    Reduction reduction, const PreparedExchangePtr& plan,
                    const Interrupted& interrupted);

}  // namespace pipecomm
