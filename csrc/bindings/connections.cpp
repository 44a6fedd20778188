#include "bindings/connections.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "bindings/interpreter_use.h"
#include "bindings/python_args.h"

namespace pipecomm {
namespace {

// A function that threads of the transport call. It is also freed with the GIL held, or not at all if the
// interpreter is ending.
using Held = std::shared_ptr<py::function>;

Held hold(py::function function) {
  return {new py::function(std::move(function)), [](py::function* it) {
            try {
              const InterpreterUse use;
              const py::gil_scoped_acquire gil;
              delete it;
            } catch (const std::runtime_error&) {
              // The interpreter frees it.
            }
          }};
}

template <class Result, class MakeArgument>
Result call(const Held& function, MakeArgument make_argument) {
  const InterpreterUse use;
  const py::gil_scoped_acquire gil;
  try {
    return (*function)(make_argument()).template cast<Result>();
  } catch (const py::error_already_set& error) {
    throw std::runtime_error(text_argument(py::str(error.value())));  // destroyed outside the lock
  }
}

// From a bit mask of cores; cores with higher numbers than a CoreSet holds are left out.
CoreSet core_set(const py::int_& cores) {
  if (cores < py::int_(0)) throw std::invalid_argument("cores must not be negative");
  const std::string digits = py::str(cores.attr("__format__")("b"));
  return CoreSet(digits.substr(digits.size() - std::min(digits.size(), CoreSet().size())));
}

}  // namespace

Connections::Connections(int rank, int size, uint32_t epoch, const py::bytes& key_bytes,
                         py::function lookup, py::function say_farewell,
                         std::optional<int> num_local_ranks) {
  const std::string key = key_bytes;
  if (key.size() != options_.tcp.key.size())
    throw std::invalid_argument("key must have 32 bytes, not " + std::to_string(key.size()));
  std::memcpy(options_.tcp.key.data(), key.data(), key.size());
  options_.rank = options_.tcp.rank = rank;
  options_.size = options_.tcp.size = size;
  options_.num_local_ranks = num_local_ranks.value_or(size);
  options_.tcp.epoch = epoch;
  options_.lookup = [held = hold(std::move(lookup))](int peer) {
    return call<std::optional<Introduction>>(held, [&] { return py::int_(peer); });
  };
  options_.say_farewell = [held = hold(std::move(say_farewell))](const std::string& farewell) {
    call<void>(held, [&] { return py::bytes(farewell); });
  };
}

void Connections::listen(const std::string& interfaces, int heartbeat_s, int heartbeat_limit_s) {
  hosts_ = tcp::local_hosts(interfaces);
  if (interfaces.empty()) {
    options_.listeners = tcp::listen_at({}, port_);
  } else {
    options_.listeners = tcp::listen_at(hosts_, port_);
    hosts_.clear();  // peers cannot miss a rank at an address that never refuses them
    for (const tcp::Socket& each : options_.listeners) hosts_.push_back(tcp::host_of(each));
  }
  options_.tcp.heartbeat = std::chrono::seconds(heartbeat_s);
  options_.tcp.heartbeat_limit = std::chrono::seconds(heartbeat_limit_s);
}

void Connections::create_memory(int channels, int64_t ring_bytes, int64_t window_bytes) {
  options_.memory = shm::Segment::create(options_.rank, {.size = options_.size,
                                                         .num_channels = channels,
                                                         .ring_bytes = ring_bytes,
                                                         .window_bytes = window_bytes,
                                                         .epoch = options_.tcp.epoch});
}

std::unique_ptr<HostTransport> Connections::make_transport(TransportEvents& events) {
  if (std::exchange(is_taken_, true))
    throw std::invalid_argument("the connections belong to a communicator");
  if (options_.size > 1 && !options_.memory && options_.listeners.empty())
    throw std::invalid_argument("there is no way to other ranks: call listen() or create_memory()");
  return std::make_unique<RoutedTransport>(std::move(options_), events);
}

void bind_connections(py::module_& m) {
  py::class_<Introduction>(m, "Introduction", "How to meet a rank, or why it refuses.")
      .def(py::init([](const py::int_& cores, int pid, std::vector<std::string> hosts,
                       uint16_t port, int memory_fd, uint64_t memory_inode, int64_t window_bytes,
                       const py::str& reason, const py::str& refusal,
                       std::optional<std::string> farewell) {
             return Introduction{core_set(cores),
                                 pid,
                                 std::move(hosts),
                                 port,
                                 memory_fd,
                                 memory_inode,
                                 window_bytes,
                                 text_argument(reason),
                                 text_argument(refusal),
                                 std::move(farewell)};
           }),
           py::kw_only(), py::arg("cores") = 0, py::arg("pid") = 0,
           py::arg("hosts") = std::vector<std::string>(), py::arg("port") = 0,
           py::arg("memory_fd") = -1, py::arg("memory_inode") = 0, py::arg("window_bytes") = 0,
           py::arg("reason") = "", py::arg("refusal") = "", py::arg("farewell") = py::none());
  py::class_<Connections>(
      m, "Connections",
      "What a rank needs to meet the others. `lookup(rank)` returns an "
      "Introduction, or None if that rank is not there yet. `say_farewell(farewell)` "
      "shows these bytes to ranks that look this one up from now on. Any one thread calls them; "
      "they return or raise within a second. `num_local_ranks`, of the whole job, share the cores "
      "of this host (default: `size`).")
      .def(py::init<int, int, uint32_t, const py::bytes&, py::function, py::function,
                    std::optional<int>>(),
           py::arg("rank"), py::arg("size"), py::arg("epoch"), py::arg("key"), py::arg("lookup"),
           py::arg("say_farewell"), py::arg("num_local_ranks") = py::none())
      .def("listen", &Connections::listen, py::arg("interfaces") = "", py::arg("heartbeat_s") = 10,
           py::arg("heartbeat_limit_s") = 60)
      .def("create_memory", &Connections::create_memory, py::arg("channels"), py::arg("ring_bytes"),
           py::arg("window_bytes"))
      .def_property_readonly("hosts", &Connections::hosts)
      .def_property_readonly("port", &Connections::port)
      .def_property_readonly("memory_fd", &Connections::memory_fd)
      .def_property_readonly("memory_inode", &Connections::memory_inode)
      .def_static(
          "memory_bytes",
          [](int size, int channels, int64_t ring_bytes) {
            return shm::SegmentShape{
                .size = size, .num_channels = channels, .ring_bytes = ring_bytes}
                .control_bytes();
          },
          py::arg("size"), py::arg("channels"), py::arg("ring_bytes"),
          "Bytes of one rank's rings and bookkeeping; pages are taken when first used.");
}

}  // namespace pipecomm
