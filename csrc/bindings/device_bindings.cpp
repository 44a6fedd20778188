#include "bindings/device_bindings.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <cstring>

#include "bindings/flight.h"
#include "bindings/point_to_point_args.h"
#include "bindings/python_args.h"
#include "bindings/work.h"
#include "copy/device_runtime_cuda.h"
#include "engine/device_communicator.h"
#include "transport/c10d_transport.h"

namespace pipecomm {
namespace {

#ifdef PIPECOMM_WITH_NCCL
const NcclApi& nccl() { return loaded_nccl(); }
std::shared_ptr<DeviceRuntime> device_runtime(int device_idx, int num_sms) {
  return make_cuda_runtime(device_idx, num_sms);
}
#else
const NcclApi& nccl() {
  throw std::runtime_error("this build of pipecomm_ext has no CUDA and NCCL support");
}
std::shared_ptr<DeviceRuntime> device_runtime(int, int) {
  throw std::runtime_error("this build of pipecomm_ext has no CUDA and NCCL support");
}
#endif

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
    const bool is_p2p = operation_->op == OpCode::p2p && !operation_->messages.empty();
    throw_still_in_flight(operation_->op, communicator_->rank(),
                          is_p2p ? operation_->messages.front().peer : -1, timeout,
                          "the device has not reached its end");
  }

  std::shared_ptr<DeviceCommunicator> communicator_;
  DeviceOperationPtr operation_;
};

class BoundDeviceCommunicator {
 public:
  using WorkPtr = std::shared_ptr<Work>;

  BoundDeviceCommunicator(const py::object& backend, int rank, int size, uint32_t epoch,
                          int num_channels, const py::object& timeout, const std::string& check,
                          int device_idx, const std::vector<py::bytes>& nccl_ids,
                          int max_ops_per_group, int min_ctas, int max_ctas,
                          int num_channels_per_net_peer, int traffic_class, int num_sms,
                          const std::string& name)
      : device_idx_(device_idx) {
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
                            " elements, one per channel and one more, not " +
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
    auto c10d_backend = backend.is_none() ? c10::intrusive_ptr<c10d::Backend>()
                                          : backend.cast<c10::intrusive_ptr<c10d::Backend>>();
    py::gil_scoped_release no_gil;
    const auto runtime = device_runtime(device_idx, num_sms);
    communicator_ = shared_with_python(new DeviceCommunicator(
        options, runtime, nccl(), ids,
        [&](TransportEvents& events) {
          return std::make_unique<C10dTransport>(std::move(c10d_backend), rank, size, epoch,
                                                 events);
        },
        check_signals));
  }

  WorkPtr batch_p2p(const py::sequence& ops, bool async_op) {
    const auto batch =
        batch_argument(ops, [&](const PointToPointArg& arg, Direction direction,
                                const std::string& name) { return view(arg, direction, name); });
    return work([&] { return communicator_->batch_p2p(batch, async_op); });
  }
  WorkPtr isend(const py::object& tensor, const py::object& dst, const py::object& channel,
                bool async_op) {
    const auto arg = point_to_point_arg<SendArg>(tensor, dst, "dst", channel);
    const PointToPoint op = view(arg, Direction::send, "tensor");
    return work([&] { return communicator_->batch_p2p({&op, 1}, async_op); });
  }
  WorkPtr irecv(const py::object& tensor, const py::object& src, const py::object& channel,
                bool async_op) {
    const auto arg = point_to_point_arg<RecvArg>(tensor, src, "src", channel);
    const PointToPoint op = view(arg, Direction::recv, "tensor");
    return work([&] { return communicator_->batch_p2p({&op, 1}, async_op); });
  }
  WorkPtr broadcast(const py::object& tensor, const py::object& src, bool async_op) {
    const int source = index_argument(src, "src");
    const bool sends = source == communicator_->rank();
    const TensorRef ref = sends ? dense_ref(tensor, "tensor") : ref_to_write(tensor, "tensor");
    return work([&] { return communicator_->broadcast(ref, source, async_op, check_signals); });
  }
  WorkPtr exchange(const std::string& op, const PreparedExchangePtr& plan,
                   const py::sequence& inputs, const py::sequence& outputs, bool async_op,
                   std::vector<int> members, const py::object& channel,
                   const std::shared_ptr<Work>& /*after: exchanges of a channel share a stream*/) {
    const auto label = [](const char* name, size_t idx) {
      return std::string(name) + "[" + std::to_string(idx) + "]";
    };
    std::vector<TensorRef> input_refs, output_refs;
    for (size_t idx = 0; idx < py::len(inputs); ++idx)
      input_refs.push_back(tensor_ref(tensor(inputs[idx], label("inputs", idx), Access::read)));
    for (size_t idx = 0; idx < py::len(outputs); ++idx)
      output_refs.push_back(ref_to_write(outputs[idx], label("outputs", idx)));
    const OpCode code = collective_code(op);
    const Scope scope = scope_argument(std::move(members), channel);
    return work([&] {
      return communicator_->exchange(code, plan, input_refs, output_refs, async_op, check_signals,
                                     scope);
    });
  }
  WorkPtr barrier(bool async_op) {
    note_call_site();
    py::gil_scoped_release no_gil;
    const std::shared_ptr<Communicator> control(communicator_, communicator_->control().get());
    return std::make_shared<HostWork>(control, communicator_->barrier(async_op));
  }
  void refuse(const std::string& op, const std::string& reason, std::vector<int> members,
              const py::object& channel) {
    const Scope scope = scope_argument(std::move(members), channel);
    const OpCode code = collective_code(op);
    note_call_site();
    py::gil_scoped_release no_gil;
    communicator_->refuse(code, reason, scope);
  }
  void abort(const std::string& reason) {
    py::gil_scoped_release no_gil;
    communicator_->abort(reason);
  }
  void close() {
    py::gil_scoped_release no_gil;
    communicator_->close(check_signals);
  }
  bool closed() const { return communicator_->closed(); }
  bool failed() const { return communicator_->failure() != nullptr; }
  py::object failure() const { return failure_dict(communicator_->failure()); }
  py::list flight_record() const { return flights_list(communicator_->flights()); }
  py::dict copy_counters() const { return counters_dict(communicator_->copy_counters()); }

 private:
  at::Tensor tensor(const py::object& object, const std::string& name, Access access) const {
    at::Tensor tensor = tensor_argument(object, name, access, at::kCUDA);
    if (tensor.device().index() != device_idx_)
      throw py::value_error(name + " is on " + tensor.device().str() +
                            ", but the communicator is for cuda:" + std::to_string(device_idx_));
    return tensor;
  }
  // Contiguous; if that takes a copy, it is made on the current stream.
  TensorRef dense_ref(const py::object& object, const std::string& name) const {
    const at::Tensor given = tensor(object, name, Access::read);
    at::NoGradGuard no_grad;
    return tensor_ref(given.contiguous());
  }
  TensorRef ref_to_write(const py::object& object, const std::string& name) const {
    const at::Tensor given = tensor(object, name, Access::write);
    mark_written(given);
    return tensor_ref(given);
  }
  PointToPoint view(const PointToPointArg& arg, Direction direction,
                    const std::string& name) const {
    return {
        direction, arg.peer, arg.channel,
        direction == Direction::send ? dense_ref(arg.tensor, name) : ref_to_write(arg.tensor, name),
        arg.signature};
  }
  template <class Post>
  WorkPtr work(Post&& post) {
    note_call_site();
    py::gil_scoped_release no_gil;
    return std::make_shared<DeviceWork>(communicator_, post());
  }

  const int device_idx_;
  std::shared_ptr<DeviceCommunicator> communicator_;
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

void bind_device(py::module_& m) {
  m.def("nccl_problem", &nccl_problem,
        "Why NCCL cannot be used in this process, or '' if it can be (a device may be missing).");
  m.def("nccl_num_ids", &DeviceCommunicator::num_nccl_ids, py::arg("channels"));
  m.def("nccl_unique_ids", &nccl_unique_ids, py::arg("count"),
        "For rank 0: ids of new NCCL communicators, for all ranks.");

  using Bound = BoundDeviceCommunicator;
  py::class_<Bound>(m, "DeviceCommunicator",
                    "Communicator for CUDA tensors over NCCL, controlled over a c10d backend.")
      .def(py::init<py::object, int, int, uint32_t, int, py::object, std::string, int,
                    std::vector<py::bytes>, int, int, int, int, int, int, std::string>(),
           py::arg("backend"), py::arg("rank"), py::arg("size"), py::arg("epoch"),
           py::arg("channels"), py::arg("timeout"), py::arg("check"), py::arg("device_idx"),
           py::arg("nccl_ids"), py::arg("max_ops_per_group") = kDefaultMaxOpsPerGroup,
           py::arg("min_ctas") = -1, py::arg("max_ctas") = -1,
           py::arg("channels_per_net_peer") = -1, py::arg("traffic_class") = -1,
           py::arg("num_sms") = 0, py::arg("name") = "pipecomm")
      .def("batch_p2p", &Bound::batch_p2p, py::arg("ops"), py::arg("async_op") = false)
      .def("isend", &Bound::isend, py::arg("tensor"), py::arg("dst"), py::arg("channel") = 0,
           py::arg("async_op") = true)
      .def("irecv", &Bound::irecv, py::arg("tensor"), py::arg("src"), py::arg("channel") = 0,
           py::arg("async_op") = true)
      .def("broadcast", &Bound::broadcast, py::arg("tensor"), py::arg("src"),
           py::arg("async_op") = false)
      .def("barrier", &Bound::barrier, py::arg("async_op") = false)
      .def("exchange", &Bound::exchange, py::arg("op"), py::arg("plan"), py::arg("inputs"),
           py::arg("outputs"), py::arg("async_op") = false, py::arg("members") = std::vector<int>(),
           py::arg("channel") = py::none(), py::arg("after") = py::none())
      .def("refuse", &Bound::refuse, py::arg("op"), py::arg("reason"),
           py::arg("members") = std::vector<int>(), py::arg("channel") = py::none())
      .def("abort", &Bound::abort, py::arg("reason"))
      .def("close", &Bound::close)
      .def("copy_counters", &Bound::copy_counters)
      .def("failure", &Bound::failure)
      .def("flight_record", &Bound::flight_record)
      .def_property_readonly("closed", &Bound::closed)
      .def_property_readonly("failed", &Bound::failed);
}

}  // namespace pipecomm
