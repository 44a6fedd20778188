#include "engine/reduce_call.h"

#include <stdexcept>

#include "plan/signature.h"
#include "transport/transport.h"

namespace pipecomm {

void check_reduce(const ReduceCall& call, int rank, int size) {
  const auto& [op, input, output, reduction, root] = call;
  const std::string name = op_name(op);
  check_peer(root, size, "root rank");
  const bool is_gather = op == OpCode::all_gather;
  const bool is_of_pieces = is_gather || op == OpCode::reduce_scatter;
  const TensorRef& piece = call.piece();
  const TensorRef& whole = op == OpCode::reduce_scatter ? input : output;
  const int64_t num_bytes = piece.num_bytes();
  if (!input.is_contiguous() || !output.is_contiguous() || input.dtype != output.dtype ||
      whole.num_bytes() != num_bytes * (is_of_pieces ? size : 1))
    throw std::invalid_argument(
        name + ": input and output must be contiguous and of one dtype, " +
        (is_of_pieces ? "with as many elements for each rank" : "with as many elements"));
  const std::byte* const own = whole.data + (is_of_pieces ? rank * num_bytes : 0);
  const bool overlap = num_bytes > 0 && piece.data < whole.data + whole.num_bytes() &&
                       whole.data < piece.data + num_bytes;
  if (overlap && piece.data != own)
    throw std::invalid_argument(name + ": input and output share memory; use separate tensors");
}

Descriptor reduce_message(const ReduceCall& call) {
  const TensorRef& piece = call.piece();
  Signature signature(op_name(call.op));
  signature.add(piece.dtype).add(Dims(piece.shape));
  if (call.op != OpCode::all_gather) signature.add(static_cast<int64_t>(call.reduction));
  if (call.op == OpCode::reduce) signature.add(call.root);
  return describe(call.op, kCollectiveChannel, call.input, signature.value(), piece.num_bytes());
}

}  // namespace pipecomm
