// What a rank needs to connect to the others, as Python has set it up: a communicator makes its
// transport from it.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bindings/python.h"
#include "routes/routed_transport.h"

namespace pipecomm {

class Connections {
 public:
  Connections(int rank, int size, uint32_t epoch, const py::bytes& key, py::function lookup,
              py::function say_farewell, std::optional<int> num_local_ranks);
  Connections(const Connections&) = delete;
  Connections& operator=(const Connections&) = delete;

  // Listens for other ranks. `interfaces`: names, separated by commas; empty: all that are up.
  void listen(const std::string& interfaces, int heartbeat_s, int heartbeat_limit_s);
  const std::vector<std::string>& hosts() const { return hosts_; }
  uint16_t port() const { return port_; }

  // Creates memory that other ranks can map. Throws std::system_error or std::invalid_argument.
  void create_memory(int channels, int64_t ring_bytes, int64_t window_bytes);
  int memory_fd() const { return options_.memory ? options_.memory->fd() : -1; }
  uint64_t memory_inode() const { return options_.memory ? options_.memory->inode() : 0; }

  // Throws std::invalid_argument if it has been made before.
  std::unique_ptr<HostTransport> make_transport(TransportEvents& events);

 private:
  RoutedOptions options_;
  std::vector<std::string> hosts_;
  uint16_t port_ = 0;
  bool is_taken_ = false;
};

void bind_connections(py::module_& m);

}  // namespace pipecomm
