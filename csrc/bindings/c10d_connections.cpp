#include <pybind11/stl.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <map>
#include <memory>
#include <system_error>
#include <utility>

#include "bindings/connections.h"
#include "transport/c10d/c10d_transport.h"

namespace pipecomm {
namespace {

namespace py = pybind11;

class C10dConnections final : public Connections {
 public:
  C10dConnections(const py::object& backend, int rank, int size, uint32_t epoch,
                  const std::map<int, pid_t>& pids)
      : rank_(rank), size_(size), epoch_(epoch) {
    if (backend.is_none() && size > 1)
      throw std::invalid_argument("a group of several ranks needs a backend");
    if (!backend.is_none()) backend_ = backend.cast<c10::intrusive_ptr<c10d::Backend>>();
    for (const auto& [peer, pid] : pids) {
      try {
        watches_[peer] = std::make_unique<ProcessWatch>(pid);
      } catch (const std::system_error&) {
        // No descriptor is left, or no pidfd is allowed: its connection has to tell.
      }
    }
  }
  std::unique_ptr<HostTransport> make_transport(TransportEvents& events) override {
    if (std::exchange(is_taken_, true))
      throw std::invalid_argument("the connections belong to a communicator");
    return std::make_unique<C10dTransport>(std::move(backend_), rank_, size_, epoch_, events,
                                           std::move(watches_));
  }

 private:
  c10::intrusive_ptr<c10d::Backend> backend_;  // null for a group of one
  const int rank_;
  const int size_;
  const uint32_t epoch_;
  std::map<int, std::unique_ptr<ProcessWatch>> watches_;  // by rank
  bool is_taken_ = false;
};

}  // namespace

void bind_c10d_connections(py::module_& m) {
  py::class_<C10dConnections, Connections>(
      m, "C10dConnections",
      "A c10d backend with point-to-point messages, as gloo has them, that nothing else uses. "
      "`pids`: the processes of the peers on this host, by rank.")
      .def(py::init<py::object, int, int, uint32_t, std::map<int, pid_t>>(), py::arg("backend"),
           py::arg("rank"), py::arg("size"), py::arg("epoch"),
           py::arg("pids") = std::map<int, pid_t>{});
}

}  // namespace pipecomm
