// The shared memory of a communicator as Python sets it up: made, shown to the peers, connected.
#pragma once

#include <torch/python.h>

#include <optional>
#include <utility>
#include <vector>

#include "transport/shm/segment.h"

namespace pipecomm {

namespace py = pybind11;

class SharedMemory {
 public:
  SharedMemory(int rank, const shm::SegmentShape& shape);
  // The descriptor that peers open through /proc while this process holds it.
  int fd() const { return own_->fd(); }
  // Maps the memory of all others and watches their processes: (pid, fd) by rank.
  void connect(const std::vector<std::pair<int, int>>& peers);
  // Once all ranks are connected: ends the time in which others could open it.
  void close_descriptor() { own_->close_fd(); }
  // Hands it over to a transport.
  shm::Neighbourhood take();

 private:
  shm::SegmentPtr own_;
  shm::Neighbourhood neighbourhood_;
};

void bind_shared_memory(py::module_& m);

}  // namespace pipecomm
