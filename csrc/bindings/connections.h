// Connections between the ranks of a group as Python has set them up. Each host transport binds a class
// of its own, from which a communicator makes the transport.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <memory>

#include "transport/transport.h"

namespace pipecomm {

class Connections {
 public:
  virtual ~Connections() = default;
  // The transport takes the connections over: throws std::invalid_argument if they are gone.
  virtual std::unique_ptr<HostTransport> make_transport(TransportEvents& events) = 0;
};

// One function for each transport.
void bind_c10d_connections(pybind11::module_& m);
void bind_shared_memory(pybind11::module_& m);

}  // namespace pipecomm
