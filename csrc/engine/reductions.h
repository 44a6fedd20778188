// Blocking reductions of tensors in host memory: exchanges, and one pass of arithmetic over the
// received data. The bits are the same on all ranks and in every run: each element is computed from
// the same numbers in the order of the ranks, or by one rank.
#pragma once

#include <span>

#include "copy/reduce_cpu.h"
#include "engine/communicator.h"

namespace pipecomm {

// In place. With one plan, every rank receives the tensors of all others, in the order of the ranks
// with a gap for its own, and reduces them itself. With two, it receives its piece of each
// (remainder_first) and reduces that; the second plan sends the pieces to all, in the order of
// `second`. `tensor` is contiguous.
void all_reduce(Communicator& communicator, const TensorRef& tensor, Reduction reduction,
                std::span<const PreparedExchangePtr> plans, const Scope& second,
                const Interrupted& interrupted);

// Writes the contiguous tensors of all ranks into `output`, one after the other.
void all_gather(Communicator& communicator, const TensorRef& output, const TensorRef& input,
                const PreparedExchangePtr& plan, const Interrupted& interrupted);

// Reduces this rank's piece of `input` over all ranks into `output`; `plan` moves the pieces of the
// others. The pieces have equal lengths. Both tensors are contiguous.
void reduce_scatter(Communicator& communicator, const TensorRef& output, const TensorRef& input,
                    Reduction reduction, const PreparedExchangePtr& plan,
                    const Interrupted& interrupted);

}  // namespace pipecomm
