#include "bindings/point_to_point_args.h"

namespace pipecomm {
namespace {

PointToPointClasses classes;

template <class Arg>
py::handle bind(py::module_& m, const char* name, const char* doc) {
  return py::class_<Arg>(m, name, doc)
      .def(py::init([](const py::object& tensor, const py::object& peer, const py::object& channel,
                       uint64_t signature) {
             Arg arg = point_to_point_arg<Arg>(tensor, peer, "peer", channel);
             arg.signature = signature;
             return arg;
           }),
           py::arg("tensor"), py::arg("peer"), py::arg("channel") = 0, py::kw_only(),
           py::arg("signature") = 0)
      .def_readonly("tensor", &Arg::tensor)
      .def_readonly("peer", &Arg::peer)
      .def_readonly("channel", &Arg::channel)
      .def("__repr__",
           [name](const Arg& arg) {
             return py::str("{}({}, peer={}, channel={})")
                 .format(name,
                         is_tensor(arg.tensor)
                             ? py::str("{}{}").format(arg.tensor.attr("dtype"),
                                                      py::list(arg.tensor.attr("shape")))
                             : py::str(arg.tensor),
                         arg.peer, arg.channel);
           })
      .release();
}

}  // namespace

const PointToPointClasses& point_to_point_classes() { return classes; }

void bind_point_to_point_args(py::module_& m) {
  classes.send = bind<SendArg>(
      m, "Send", "Send(tensor, peer, channel=0): an element of batch_p2p; peer is a group rank.");
  classes.recv = bind<RecvArg>(
      m, "Recv", "Recv(tensor, peer, channel=0): an element of batch_p2p; peer is a group rank.");
}

}  // namespace pipecomm
