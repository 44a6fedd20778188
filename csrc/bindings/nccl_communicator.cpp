// NCCL for Python: a constructor of its communicator.
#include "bindings/communicator.h"
#include "bindings/connections.h"
#include "bindings/cuda.h"
#include "bindings/flight.h"
#include "engine/device/device_execution.h"
#include "plan/signature.h"

namespace pipecomm {
namespace {

const NcclApi& nccl() {
#ifdef PIPECOMM_WITH_CUDA
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
    const std::string& check, int device_idx, int max_ops_per_group, int min_ctas, int max_ctas,
    int num_channels_per_net_peer, int traffic_class, int num_sms, const std::string& host,
    const std::string& capture_problem) {
  CommunicatorOptions options;
  options.rank = rank;
  options.size = size;
  options.num_channels = num_channels;
  options.timeout = timeout_argument(timeout);
  options.on_failure = raise_flight_alarm;
  DeviceOptions device_options;
  device_options.check = check_argument(check);
  device_options.max_ops_per_group = max_ops_per_group;
  device_options.nccl = {min_ctas, max_ctas, num_channels_per_net_peer, traffic_class};
  if (!host.empty()) device_options.host = Signature(host).value() | 1;
  device_options.capture_problem = capture_problem;
  py::gil_scoped_release no_gil;
  const auto runtime = device_runtime(device_idx, num_sms);
  auto communicator = make_device_communicator(
      options, device_options, runtime, nccl(),
      [&](TransportEvents& events) { return connections.make_transport(events); });
  return std::make_unique<BoundCommunicator>(std::move(communicator),
                                             DeviceArgument{dlpack::kCuda, device_idx}, true);
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

}  // namespace

void bind_nccl_communicator(py::module_& m, py::class_<BoundCommunicator>& communicator) {
  m.def("nccl_problem", &nccl_problem,
        "Why NCCL cannot be used in this process, or '' if it can be (a device may be missing).");

  communicator.def(py::init(&make_nccl_communicator), py::arg("connections"), py::arg("rank"),
                   py::arg("size"), py::arg("channels"), py::arg("timeout"), py::arg("check"),
                   py::arg("device_idx"), py::arg("max_ops_per_group") = kDefaultMaxOpsPerGroup,
                   py::arg("min_ctas") = -1, py::arg("max_ctas") = -1,
                   py::arg("channels_per_net_peer") = -1, py::arg("traffic_class") = -1,
                   py::arg("num_sms") = 0, py::arg("host") = "", py::arg("capture_problem") = "");
}

}  // namespace pipecomm
