#include <pybind11/stl.h>

#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bindings/connections.h"
#include "transport/c10d/c10d_transport.h"

namespace pipecomm {
namespace {

namespace py = pybind11;

// A rank's place to be called at, shown to the peers, then told of theirs.
class C10dConnections final : public Connections {
 public:
  C10dConnections(int rank, int size, uint32_t epoch, const std::string& interfaces)
      : hosts_(tcp::local_hosts(interfaces)) {
    options_.rank = rank;
    options_.size = size;
    options_.epoch = epoch;
    listener_ = tcp::listen_anywhere(port_);
  }
  uint16_t port() const { return port_; }
  const std::vector<std::string>& hosts() const { return hosts_; }

  void connect(const std::string& token,
               const std::vector<std::pair<std::vector<std::string>, uint16_t>>& contacts,
               std::vector<pid_t> pids, int num_local_ranks, int heartbeat_s,
               int heartbeat_limit_s) {
    const auto size = static_cast<size_t>(options_.size);
    if (token.size() != options_.token.size() || contacts.size() != size || pids.size() != size)
      throw std::invalid_argument(
          "connect() takes a token of 16 bytes, and a contact and a pid of "
          "each rank");
    std::memcpy(options_.token.data(), token.data(), token.size());
    for (const auto& [hosts, port] : contacts) options_.contacts.push_back({hosts, port});
    options_.pids = std::move(pids);
    options_.num_local_ranks = num_local_ranks;
    options_.heartbeat = std::chrono::seconds(heartbeat_s);
    options_.heartbeat_limit = std::chrono::seconds(heartbeat_limit_s);
  }
  std::unique_ptr<HostTransport> make_transport(TransportEvents& events) override {
    if (!listener_) throw std::invalid_argument("the connections belong to a communicator");
    if (options_.size > 1 && options_.contacts.empty())
      throw std::invalid_argument("the other ranks are not known yet; call connect() first");
    return std::make_unique<tcp::C10dTransport>(options_, std::move(listener_), events);
  }

 private:
  const std::vector<std::string> hosts_;
  tcp::C10dOptions options_;
  uint16_t port_ = 0;
  tcp::Socket listener_;
};

}  // namespace

void bind_c10d_connections(py::module_& m) {
  py::class_<C10dConnections, Connections>(
      m, "C10dConnections",
      "Listens for the other ranks of a communicator. `interfaces`: names, separated by commas; "
      "empty: all that are up.")
      .def(py::init<int, int, uint32_t, std::string>(), py::arg("rank"), py::arg("size"),
           py::arg("epoch"), py::arg("interfaces") = "")
      .def_property_readonly("port", &C10dConnections::port)
      .def_property_readonly("hosts", &C10dConnections::hosts)
      .def("connect", &C10dConnections::connect, py::arg("token"), py::arg("contacts"),
           py::arg("pids"), py::arg("num_local_ranks") = 1, py::arg("heartbeat_s") = 10,
           py::arg("heartbeat_limit_s") = 60,
           "Tells where the ranks listen: (hosts, port) of each, most promising host first. "
           "`pids`: of those on this host, else 0.");
}

}  // namespace pipecomm
