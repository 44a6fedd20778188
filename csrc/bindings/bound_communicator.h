// What Python's communicators for host and for device memory have in common.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bindings/flight.h"
#include "bindings/point_to_point_args.h"
#include "bindings/python_args.h"
#include "bindings/work.h"

namespace pipecomm {

// `Derived` posts point-to-point batches: post_p2p(async_op, batch_of), where `batch_of(view)` makes
// the batch of what `view(arg, direction, name)` makes of each message. `Handle` is the Work of an
// operation of `Engine`.
template <class Derived, class Engine, class Handle>
class BoundCommunicator {
 public:
  using WorkPtr = std::shared_ptr<Work>;

  WorkPtr batch_p2p(const py::sequence& ops, bool async_op) {
    return self().post_p2p(async_op, [&](auto&& view) { return batch_argument(ops, view); });
  }
  WorkPtr isend(const py::object& tensor, const py::object& dst, const py::object& channel,
                bool async_op) {
    return post_one<SendArg>(Direction::send, tensor, dst, "dst", channel, async_op);
  }
  WorkPtr irecv(const py::object& tensor, const py::object& src, const py::object& channel,
                bool async_op) {
    return post_one<RecvArg>(Direction::recv, tensor, src, "src", channel, async_op);
  }
  void refuse(const std::string& op, const std::string& reason, std::vector<int> members,
              const py::object& channel) {
    const Scope scope = scope_argument(std::move(members), channel);
    const OpCode code = collective_code(op);
    note_call_site();
    py::gil_scoped_release no_gil;
    communicator_->refuse(code, reason, scope);
  }
  void abort(const std::string& reason) {
    py::gil_scoped_release no_gil;
    communicator_->abort(reason);
  }
  void close() {
    py::gil_scoped_release no_gil;
    communicator_->close(check_signals);
  }
  bool closed() const { return communicator_->closed(); }
  bool failed() const { return communicator_->failure() != nullptr; }
  py::object failure() const { return failure_dict(communicator_->failure()); }
  py::list flight_record() const { return flights_list(communicator_->flights()); }
  py::dict copy_counters() const { return counters_dict(communicator_->copy_counters()); }

 protected:
  template <class Post>
  WorkPtr work(Post&& post) {
    note_call_site();
    py::gil_scoped_release no_gil;
    return std::make_shared<Handle>(communicator_, post());
  }

  std::shared_ptr<Engine> communicator_;

 private:
  Derived& self() { return static_cast<Derived&>(*this); }
  template <class Arg>
  WorkPtr post_one(Direction direction, const py::object& tensor, const py::object& peer,
                   const char* peer_name, const py::object& channel, bool async_op) {
    const auto arg = point_to_point_arg<Arg>(tensor, peer, peer_name, channel);
    return self().post_p2p(async_op,
                           [&](auto&& view) { return std::array{view(arg, direction, "tensor")}; });
  }
};

// async_op=False: wait() follows at once, on the same thread.
template <class Bound>
py::class_<Bound> bind_operations(py::class_<Bound> type) {
  return type.def("batch_p2p", &Bound::batch_p2p, py::arg("ops"), py::arg("async_op") = false)
      .def("isend", &Bound::isend, py::arg("tensor"), py::arg("dst"), py::arg("channel") = 0,
           py::arg("async_op") = true)
      .def("irecv", &Bound::irecv, py::arg("tensor"), py::arg("src"), py::arg("channel") = 0,
           py::arg("async_op") = true)
      .def("broadcast", &Bound::broadcast, py::arg("tensor"), py::arg("src"),
           py::arg("async_op") = false)
      .def("barrier", &Bound::barrier, py::arg("async_op") = false)
      .def("exchange", &Bound::exchange, py::arg("op"), py::arg("plan"), py::arg("inputs"),
           py::arg("outputs"), py::arg("async_op") = false, py::arg("members") = std::vector<int>(),
           py::arg("channel") = py::none(), py::arg("after") = py::none(),
           py::arg("gradient_of") = 0)
      .def("refuse", &Bound::refuse, py::arg("op"), py::arg("reason"),
           py::arg("members") = std::vector<int>(), py::arg("channel") = py::none())
      .def("abort", &Bound::abort, py::arg("reason"))
      .def("close", &Bound::close)
      .def("copy_counters", &Bound::copy_counters)
      .def("failure", &Bound::failure)
      .def("flight_record", &Bound::flight_record)
      .def_property_readonly("closed", &Bound::closed)
      .def_property_readonly("failed", &Bound::failed);
}

}  // namespace pipecomm
