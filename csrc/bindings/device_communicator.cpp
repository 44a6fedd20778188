#include <ATen/ops/empty.h>

#include <cstring>

#include "bindings/bound_communicator.h"
#include "bindings/communicator.h"
#include "bindings/connections.h"
#include "bindings/cuda.h"
#include "engine/device/device_communicator.h"

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

class DeviceWork final : public Work {
 public:
  DeviceWork(std::shared_ptr<DeviceCommunicator> communicator, DeviceOperationPtr operation)
      : communicator_(std::move(communicator)), operation_(std::move(operation)) {}

  void wait(const py::object& timeout) override {
    const auto limit = timeout_argument(timeout);
    if (limit) return wait_on_host(Clock::now() + *limit, timeout);
    py::gil_scoped_release no_gil;
    communicator_->wait(*operation_);
  }
  void synchronize() override { wait_on_host(Deadline::max(), py::none()); }
  bool is_completed() override { return communicator_->is_completed(*operation_); }

 private:
  void wait_on_host(Deadline until, const py::object& timeout) {
    bool finished;
    {
      py::gil_scoped_release no_gil;
      finished = communicator_->synchronize(*operation_, until, check_signals);
    }
    if (finished) return;
    throw_still_in_flight(operation_->op, communicator_->rank(), operation_->messages, timeout);
  }

  std::shared_ptr<DeviceCommunicator> communicator_;
  DeviceOperationPtr operation_;
};

class NcclCommunicator final : public CommunicatorOver<DeviceCommunicator, DeviceWork> {
 public:
  NcclCommunicator(Connections& connections, int rank, int size, int num_channels,
                   const py::object& timeout, const std::string& check, int device_idx,
                   const std::vector<py::bytes>& nccl_ids, int max_ops_per_group, int min_ctas,
                   int max_ctas, int num_channels_per_net_peer, int traffic_class, int num_sms,
                   const std::string& name)
      : device_(at::kCUDA, static_cast<at::DeviceIndex>(device_idx)) {
    DeviceOptions options;
    options.rank = rank;
    options.size = size;
    options.num_channels = num_channels;
    options.timeout = timeout_argument(timeout);
    options.check = check_argument(check);
    options.on_failure = raise_flight_alarm;
    options.max_ops_per_group = max_ops_per_group;
    options.nccl = {min_ctas, max_ctas, num_channels_per_net_peer, traffic_class, name};
    const auto num_ids = size > 1 ? DeviceCommunicator::num_nccl_ids(num_channels) : 0;
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
    communicator_ = shared_with_python(new DeviceCommunicator(
        options, runtime, nccl(), ids,
        [&](TransportEvents& events) { return connections.make_transport(events); },
        check_signals));
  }

  WorkPtr post_p2p(bool async_op, const BatchOf& batch_of) override {
    const auto batch =
        batch_of([&](const PointToPointArg& arg, Direction direction, const std::string& name) {
          return PointToPoint{direction, arg.peer, arg.channel,
                              direction == Direction::send ? ref_to_read(arg.tensor, name)
                                                           : ref_to_write(arg.tensor, name),
                              arg.signature};
        });
    return work([&] { return communicator_->batch_p2p(batch, async_op); });
  }

  WorkPtr broadcast(const py::object& tensor, const py::object& src, bool async_op) override {
    const int source = index_argument(src, "src");
    const bool sends = source == communicator_->rank();
    const TensorRef ref = sends ? ref_to_read(tensor, "tensor") : ref_to_write(tensor, "tensor");
    return work([&] { return communicator_->broadcast(ref, source, async_op, check_signals); });
  }
  // Exchanges of a channel share its first lane, so what `after` names comes first anyway. `gradient_of`
  // would make each exchange a new one, which ranks compare before they run it: it is not compared.
  WorkPtr exchange(const std::string& op, const PreparedExchangePtr& plan,
                   const py::sequence& inputs, const py::sequence& outputs, bool async_op,
                   std::vector<int> members, const py::object& channel,
                   const std::shared_ptr<Work>& /*after*/, uint64_t /*gradient_of*/) override {
    const auto ref_of = [&](const py::object& object, const std::string& name, Access access) {
      return access == Access::write ? ref_to_write(object, name) : ref_to_read(object, name);
    };
    const auto input_refs = tensor_refs(inputs, "inputs", Access::read, ref_of);
    const auto output_refs = tensor_refs(outputs, "outputs", Access::write, ref_of);
    const OpCode code = collective_code(op);
    const Scope scope = scope_argument(std::move(members), channel);
    return work([&] {
      return communicator_->exchange(code, plan, input_refs, output_refs, async_op, check_signals,
                                     scope);
    });
  }
  at::Tensor empty(const std::vector<int64_t>& shape, at::ScalarType dtype) override {
    return at::empty(shape, at::TensorOptions().dtype(dtype).device(device_));
  }
  void close() override {
    const auto warn = [&] {
      const std::string& text = communicator_->end_warning();
      return text.empty() || PyErr_WarnEx(PyExc_RuntimeWarning, text.c_str(), 1) == 0;
    };
    try {
      CommunicatorOver::close();
    } catch (...) {
      if (!warn()) PyErr_Clear();  // the failure tells more
      throw;
    }
    if (!warn()) throw py::error_already_set();
  }
  WorkPtr barrier(bool async_op) override {
    note_call_site();
    py::gil_scoped_release no_gil;
    const std::shared_ptr<Communicator> control(communicator_, communicator_->control().get());
    return std::make_shared<HostWork>(control, communicator_->barrier(async_op));
  }

 private:
  at::Tensor tensor(const py::object& object, const std::string& name, Access access) const {
    return tensor_argument(object, name, access, device_);
  }
  TensorRef ref_to_read(const py::object& object, const std::string& name) const {
    return tensor_ref(tensor(object, name, Access::read));
  }
  TensorRef ref_to_write(const py::object& object, const std::string& name) const {
    const at::Tensor given = tensor(object, name, Access::write);
    mark_written(given);
    return tensor_ref(given);
  }

  const at::Device device_;
};

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

void bind_device_communicator(py::module_& m, py::class_<BoundCommunicator>& communicator) {
  m.def("nccl_problem", &nccl_problem,
        "Why NCCL cannot be used in this process, or '' if it can be (a device may be missing).");
  m.def("nccl_num_ids", &DeviceCommunicator::num_nccl_ids, py::arg("channels"));
  m.def("nccl_unique_ids", &nccl_unique_ids, py::arg("count"),
        "For rank 0: ids of new NCCL communicators, for all ranks.");

  communicator.def(made<NcclCommunicator, Connections&, int, int, int, py::object, std::string, int,
                        std::vector<py::bytes>, int, int, int, int, int, int, std::string>(),
                   py::arg("connections"), py::arg("rank"), py::arg("size"), py::arg("channels"),
                   py::arg("timeout"), py::arg("check"), py::arg("device_idx"), py::arg("nccl_ids"),
                   py::arg("max_ops_per_group") = kDefaultMaxOpsPerGroup, py::arg("min_ctas") = -1,
                   py::arg("max_ctas") = -1, py::arg("channels_per_net_peer") = -1,
                   py::arg("traffic_class") = -1, py::arg("num_sms") = 0,
                   py::arg("name") = "pipecomm");
}

}  // namespace pipecomm
