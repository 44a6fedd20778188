// Send(tensor, peer, channel) and Recv(...), the elements of a batch as Python holds them.
#pragma once

#include "bindings/python_args.h"
#include "bindings/torch_types.h"

namespace pipecomm {

struct PointToPointArg {
  py::object tensor;
  int peer;
  int channel;
  uint64_t signature = 0;
};
struct SendArg : PointToPointArg {
  static constexpr const char* kPeer = "dst";  // as send() calls it
};
struct RecvArg : PointToPointArg {
  static constexpr const char* kPeer = "src";
};

// Their Python classes: comparing them is faster than pybind11's look-up of the object's class.
struct PointToPointClasses {
  py::handle send, recv;
};
const PointToPointClasses& point_to_point_classes();

// Null unless the object is of the class that Arg was bound to, or of one derived from it.
template <class Arg>
const Arg* as(py::handle object, py::handle type) {
  if (py::type::handle_of(object).is(type))
    return reinterpret_cast<py::detail::instance*>(object.ptr())
        ->get_value_and_holder()
        .template value_ptr<Arg>();
  return py::isinstance(object, type) ? &object.cast<const Arg&>() : nullptr;
}

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

}  // namespace pipecomm
