#include <optional>
#include <utility>
#include <vector>

#include "bindings/connections.h"
#include "transport/shm/segment.h"
#include "transport/shm/shm_transport.h"

namespace pipecomm {
namespace {

namespace py = pybind11;

// The shared memory of a communicator: made, shown to the peers, connected.
class SharedMemory final : public Connections {
 public:
  SharedMemory(int rank, const shm::SegmentShape& shape);
  // The descriptor that peers open through /proc while this process holds it.
  int fd() const { return own_->fd(); }
  // Maps the memory of all others and watches their processes: (pid, fd) by rank.
  void connect(const std::vector<std::pair<int, int>>& peers);
  // Once all ranks are connected: ends the time in which others could open it.
  void close_descriptor() { own_->close_fd(); }
  std::unique_ptr<HostTransport> make_transport(TransportEvents& events) override;

 private:
  shm::SegmentPtr own_;
  shm::Neighbourhood neighbourhood_;
};

SharedMemory::SharedMemory(int rank, const shm::SegmentShape& shape)
    : own_(shm::Segment::create(rank, shape)) {}

void SharedMemory::connect(const std::vector<std::pair<int, int>>& peers) {
  const shm::SegmentShape& shape = own_->shape();
  if (static_cast<int>(peers.size()) != shape.size)
    throw std::invalid_argument("peers must name " + std::to_string(shape.size) + " ranks, not " +
                                std::to_string(peers.size()));
  shm::Neighbourhood neighbourhood;
  for (int rank = 0; rank < shape.size; ++rank) {
    const auto& [pid, fd] = peers[rank];
    const bool is_own = rank == own_->rank();
    // The watch comes first: what is opened after it belongs to the process that is watched.
    neighbourhood.watches.push_back(is_own ? nullptr : std::make_unique<ProcessWatch>(pid));
    neighbourhood.segments.push_back(is_own ? own_ : shm::Segment::open(pid, fd, rank, shape));
  }
  neighbourhood_ = std::move(neighbourhood);
}

std::unique_ptr<HostTransport> SharedMemory::make_transport(TransportEvents& events) {
  if (neighbourhood_.segments.empty())
    throw std::invalid_argument("shared memory is not connected, or belongs to a communicator");
  return std::make_unique<shm::ShmTransport>(std::exchange(neighbourhood_, {}), own_->rank(),
                                             events);
}

}  // namespace

void bind_shared_memory(py::module_& m) {
  py::class_<SharedMemory, Connections>(m, "SharedMemory")
      .def(py::init([](int rank, int size, int channels, int64_t ring_bytes, int64_t window_bytes,
                       uint32_t epoch) {
             return SharedMemory(rank, {.size = size,
                                        .num_channels = channels,
                                        .ring_bytes = ring_bytes,
                                        .window_bytes = window_bytes,
                                        .epoch = epoch});
           }),
           py::arg("rank"), py::arg("size"), py::arg("channels"), py::arg("ring_bytes"),
           py::arg("window_bytes"), py::arg("epoch"))
      .def_property_readonly("fd", &SharedMemory::fd)
      .def("connect", &SharedMemory::connect, py::arg("peers"))
      .def("close_descriptor", &SharedMemory::close_descriptor)
      .def_static(
          "control_bytes",
          [](int size, int channels, int64_t ring_bytes) {
            return shm::SegmentShape{
                .size = size, .num_channels = channels, .ring_bytes = ring_bytes}
                .control_bytes();
          },
          py::arg("size"), py::arg("channels"), py::arg("ring_bytes"),
          "Bytes of one rank's rings and bookkeeping; pages are taken when first used.");
}

}  // namespace pipecomm
