// Send(tensor, peer, channel) and Recv(...), the elements of a batch as Python holds them.
#pragma once

#include <string>
#include <vector>

#include "bindings/python_args.h"

namespace pipecomm {

struct PointToPointArg {
  py::object tensor;
  int peer;
  int channel;
  uint64_t signature = 0;
};
struct SendArg : PointToPointArg {};
struct RecvArg : PointToPointArg {};

void bind_point_to_point_args(py::module_& m);

template <class Arg>
Arg point_to_point_arg(const py::object& tensor, const py::object& peer, const char* peer_name,
                       const py::object& channel) {
  Arg arg;
  arg.tensor = tensor;
  arg.peer = index_argument(peer, peer_name);
  arg.channel = index_argument(channel, "channel");
  return arg;
}

// `view(arg, direction, name)` makes the engine's view of one element.
template <class View>
std::vector<PointToPoint> batch_argument(const py::sequence& ops, View&& view) {
  std::vector<PointToPoint> batch;
  const size_t num_ops = py::len(ops);
  batch.reserve(num_ops);
  for (size_t op_idx = 0; op_idx < num_ops; ++op_idx) {
    const py::object op = ops[op_idx];
    const auto name = [&] {
      return num_ops == 1 ? std::string("tensor") : "ops[" + std::to_string(op_idx) + "]: tensor";
    };
    if (py::isinstance<SendArg>(op))
      batch.push_back(view(op.cast<const SendArg&>(), Direction::send, name()));
    else if (py::isinstance<RecvArg>(op))
      batch.push_back(view(op.cast<const RecvArg&>(), Direction::recv, name()));
    else
      throw py::type_error("ops[" + std::to_string(op_idx) +
                           "] must be a Send, a Recv or a torch.distributed.P2POp, not " +
                           Py_TYPE(op.ptr())->tp_name);
  }
  return batch;
}

}  // namespace pipecomm
