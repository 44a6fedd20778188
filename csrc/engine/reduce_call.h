// A reduction of a tensor of each rank in one operation, or a gather of these tensors, and its
// validation.
#pragma once

#include "copy/reduce_cpu.h"
#include "engine/point_to_point.h"

namespace pipecomm {

// The tensors are contiguous and have one dtype. The input of a reduce_scatter and the output of an
// all_gather have room for the tensors of all ranks, one after the other.
struct ReduceCall {
  OpCode op;  // all_reduce, reduce, reduce_scatter or all_gather
  const TensorRef& input;
  const TensorRef& output;                // reduce: written on the root only
  Reduction reduction = Reduction::kSum;  // unused by all_gather
  int root = 0;                           // of reduce

  // What one rank has of a result, or in a gather sends to all.
  const TensorRef& piece() const { return op == OpCode::reduce_scatter ? output : input; }
};

// Throws std::invalid_argument unless the root is a rank, the tensors fit each other, and they share
// no memory, or are the same, or the piece is this rank's own place in the other one.
void check_reduce(const ReduceCall& call, int rank, int size);

// Describes the call, as all ranks do: what each of them sends to the others.
Descriptor reduce_message(const ReduceCall& call);

}  // namespace pipecomm
