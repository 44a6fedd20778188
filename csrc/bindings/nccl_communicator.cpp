// What Python has for NCCL: a constructor of its communicator, and the ids that it takes.
#include <cstring>

#include "bindings/communicator.h"
#include "bindings/connections.h"
#include "bindings/cuda.h"
#include "bindings/flight.h"
#include "engine/device/device_execution.h"

namespace pipecomm {
namespace {

const NcclApi& nccl() {
#ifdef PIPECOMM_WITH_NCCL
  return loaded_nccl();
#else
  throw std::runtime_error("this build of pipecomm_ext has no CUDA and NCCL support");
#endif
}

Check check_argument(const std::string& name) {
  if (name == "auto") return Check::first_use;
  if (name == "full") return Check::full;
  if (name == "off") return Check::off;
  throw py::value_error("check must be 'auto', 'full' or 'off', not '" + name + "'");
}

std::unique_ptr<BoundCommunicator> make_nccl_communicator(
    Connections& connections, int rank, int size, int num_channels, const py::object& timeout,
    const std::string& check, int device_idx, const std::vector<py::bytes>& nccl_ids,
    int max_ops_per_group, int min_ctas, int max_ctas, int num_channels_per_net_peer,
    int traffic_class, int num_sms, const std::string& name) {
  CommunicatorOptions options;
  options.rank = rank;
  options.size = size;
  options.num_channels = num_channels;
  options.timeout = timeout_argument(timeout);
  options.on_failure = raise_flight_alarm;
  DeviceOptions device_options;
  device_options.check = check_argument(check);
  device_options.max_ops_per_group = max_ops_per_group;
  device_options.nccl = {min_ctas, max_ctas, num_channels_per_net_peer, traffic_class, name};
  const auto num_ids = size > 1 ? DeviceExecution::num_nccl_ids(num_channels) : 0;
  if (nccl_ids.size() != static_cast<size_t>(num_ids))
    throw py::value_error("nccl_ids must have " + std::to_string(num_ids) +
                          " elements, two per channel and one more, not " +
                          std::to_string(nccl_ids.size()));
  std::vector<NcclUniqueId> ids;
  for (const py::bytes& id : nccl_ids) {
    const std::string_view bytes = id;
    NcclUniqueId& copy = ids.emplace_back();
    if (bytes.size() != sizeof copy.bytes)
      throw py::value_error("an element of nccl_ids must have " +
                            std::to_string(sizeof copy.bytes) + " bytes, not " +
                            std::to_string(bytes.size()));
    std::memcpy(copy.bytes, bytes.data(), bytes.size());
  }
  py::gil_scoped_release no_gil;
  const auto runtime = device_runtime(device_idx, num_sms);
  auto communicator = make_device_communicator(
      options, device_options, runtime, nccl(), ids,
      [&](TransportEvents& events) { return connections.make_transport(events); }, check_signals);
  const at::Device device(at::kCUDA, static_cast<at::DeviceIndex>(device_idx));
  return std::make_unique<BoundCommunicator>(std::move(communicator), device, true);
}

// "" if NCCL can be used in this process, else why not.
std::string nccl_problem() {
  try {
    nccl();
    return "";
  } catch (const std::exception& error) {
    return error.what();
  }
}

std::vector<py::bytes> nccl_unique_ids(int count) {
  std::vector<py::bytes> ids;
  for (int id_idx = 0; id_idx < count; ++id_idx) {
    NcclUniqueId id;
    const NcclResult result = nccl().get_unique_id(&id);
    if (result != NcclResult::success)
      throw std::runtime_error(nccl_error_text(nccl(), "ncclGetUniqueId", result, nullptr));
    ids.emplace_back(id.bytes, sizeof id.bytes);
  }
  return ids;
}

}  // namespace

void bind_nccl_communicator(py::module_& m, py::class_<BoundCommunicator>& communicator) {
  m.def("nccl_problem", &nccl_problem,
        "Why NCCL cannot be used in this process, or '' if it can be (a device may be missing).");
  m.def("nccl_num_ids", &DeviceExecution::num_nccl_ids, py::arg("channels"));
  m.def("nccl_unique_ids", &nccl_unique_ids, py::arg("count"),
        "For rank 0: ids of new NCCL communicators, for all ranks.");

  communicator.def(
      py::init(&make_nccl_communicator), py::arg("connections"), py::arg("rank"), py::arg("size"),
      py::arg("channels"), py::arg("timeout"), py::arg("check"), py::arg("device_idx"),
      py::arg("nccl_ids"), py::arg("max_ops_per_group") = kDefaultMaxOpsPerGroup,
      py::arg("min_ctas") = -1, py::arg("max_ctas") = -1, py::arg("channels_per_net_peer") = -1,
      py::arg("traffic_class") = -1, py::arg("num_sms") = 0, py::arg("name") = "pipecomm");
}

}  // namespace pipecomm
