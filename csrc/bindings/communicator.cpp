#include "bindings/communicator.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/CPUAllocator.h>

#include <utility>

#include "bindings/connections.h"
#include "bindings/cuda.h"
#include "bindings/flight.h"

namespace pipecomm {
namespace {

// For tensors in host memory, and for tensors in device memory that are staged through it.
std::unique_ptr<BoundCommunicator> make_communicator(Connections& connections, int rank, int size,
                                                     int num_channels, const py::object& timeout,
                                                     int num_threads, bool checks,
                                                     const std::string& device_name, int num_sms) {
  const at::Device device(device_name);
  CommunicatorOptions options;
  options.rank = rank;
  options.size = size;
  options.num_channels = num_channels;
  options.timeout = timeout_argument(timeout);
  options.num_threads = num_threads;
  options.checks = checks;
  options.on_failure = raise_flight_alarm;
  py::gil_scoped_release no_gil;
  if (device.is_cuda()) options.device = device_runtime(device.index(), num_sms);
  auto communicator = std::make_unique<Communicator>(
      options, [&](TransportEvents& events) { return connections.make_transport(events); });
  return std::make_unique<BoundCommunicator>(std::move(communicator), device, false);
}

}  // namespace

template <class Post>
BoundCommunicator::WorkPtr BoundCommunicator::work(Post&& post) {
  note_call_site();
  py::gil_scoped_release no_gil;
  return std::make_shared<OperationWork>(communicator_, post());
}

// What the engine reads or writes for a tensor of the user; that of a device by its strides.
TensorRef BoundCommunicator::ref(const py::object& object, const std::string& name, Access access,
                                 StandIns& stand_ins, bool is_async, bool by_strides) const {
  const at::Tensor tensor = tensor_argument(object, name, access, device_);
  if (access == Access::write) mark_written(tensor);
  if (on_streams_) return tensor_ref(tensor);
  const at::Tensor used = by_strides || !device_.is_cpu() ? tensor
                          : access == Access::write       ? stand_ins.for_tensor(tensor)
                                                          : without_gaps(tensor);
  // While a caller waits, nobody gives the storage other memory.
  if (!is_async || (access == Access::read && !used.is_same(tensor))) return tensor_ref(used);
  auto pin = std::make_shared<Pin>(tensor.storage());
  if (access == Access::write) stand_ins.expect(tensor, pin);
  return used.is_same(tensor) ? tensor_ref(used, std::move(pin)) : tensor_ref(used);
}

BoundCommunicator::WorkPtr BoundCommunicator::post_p2p(bool async_op, const BatchOf& batch_of) {
  StandIns stand_ins;
  const auto batch =
      batch_of([&](const PointToPointArg& arg, Direction direction, const std::string& name) {
        const Access access = direction == Direction::send ? Access::read : Access::write;
        return PointToPoint{direction, arg.peer, arg.channel,
                            ref(arg.tensor, name, access, stand_ins, async_op), arg.signature};
      });
  return work([&] {
    return communicator_->batch_p2p(batch,
                                    {async_op, check_signals, std::move(stand_ins).copy_back()});
  });
}

BoundCommunicator::WorkPtr BoundCommunicator::broadcast(const py::object& object,
                                                        const py::object& src, bool async_op) {
  const int source = index_argument(src, "src");
  const bool sends = source == communicator_->rank();
  StandIns stand_ins;
  const TensorRef tensor =
      ref(object, "tensor", sends ? Access::read : Access::write, stand_ins, async_op);
  return work([&] {
    return communicator_->broadcast(tensor, source,
                                    {async_op, check_signals, std::move(stand_ins).copy_back()});
  });
}

BoundCommunicator::WorkPtr BoundCommunicator::barrier(bool async_op) {
  return work([&] { return communicator_->barrier(async_op); });
}

BoundCommunicator::WorkPtr BoundCommunicator::exchange(
    const std::string& op, const PreparedExchangePtr& plan, const py::sequence& inputs,
    const py::sequence& outputs, bool async_op, std::vector<int> members, const py::object& channel,
    const std::shared_ptr<Work>& after, uint64_t gradient_of) {
  StandIns stand_ins;
  const auto ref_of = [&](const py::object& object, const std::string& name, Access access) {
    return ref(object, name, access, stand_ins, async_op, true);
  };
  const auto input_refs = tensor_refs(inputs, "inputs", Access::read, ref_of);
  const auto output_refs = tensor_refs(outputs, "outputs", Access::write, ref_of);
  const OpCode code = collective_code(op);
  Scope scope = scope_argument(std::move(members), channel);
  scope.gradient_of = gradient_of;
  const auto* first = after ? dynamic_cast<const OperationWork*>(after.get()) : nullptr;
  if (after && !first) throw py::type_error("after must be the Work of one exchange");
  return work([&] {
    return communicator_->exchange(code, plan, input_refs, output_refs,
                                   {async_op, check_signals, std::move(stand_ins).copy_back()},
                                   scope, first ? first->operation() : nullptr);
  });
}

void BoundCommunicator::refuse(const std::string& op, const py::str& reason,
                               std::vector<int> members, const py::object& channel) {
  const std::string text = text_argument(reason);
  const Scope scope = scope_argument(std::move(members), channel);
  const OpCode code = collective_code(op);
  note_call_site();
  py::gil_scoped_release no_gil;
  communicator_->refuse(code, text, scope);
}

void BoundCommunicator::connect(const std::vector<int>& peers,
                                const std::optional<std::vector<int>>& channels,
                                const std::optional<std::string>& direction) {
  std::optional<Direction> way;
  if (direction == "send")
    way = Direction::send;
  else if (direction == "recv")
    way = Direction::recv;
  else if (direction)
    throw std::invalid_argument("direction must be 'send', 'recv' or None, not '" + *direction +
                                "'");
  py::gil_scoped_release no_gil;
  communicator_->connect(peers, channels, way);
}

std::pair<std::string, std::string> BoundCommunicator::route(int peer) const {
  const Route route = communicator_->route(peer);
  return {route.transport, route.reason};
}

at::Tensor BoundCommunicator::empty(const std::vector<int64_t>& shape, at::ScalarType dtype) {
  const at::TensorOptions options = at::TensorOptions().dtype(dtype).device(device_);
  if (!device_.is_cpu()) return at::empty(shape, options);
  int64_t num_bytes = static_cast<int64_t>(options.dtype().itemsize());
  for (int64_t length : shape)
    if (length < 0 || __builtin_mul_overflow(num_bytes, length, &num_bytes))
      throw py::value_error("shape must hold lengths >= 0, and not too many elements");
  auto memory = communicator_->allocate_result(num_bytes);
  if (!memory) return at::empty(shape, options);
  std::byte* const data = memory.get();
  const at::Tensor tensor = at::from_blob(
      data, shape, [memory = std::move(memory)](void*) mutable { memory.reset(); }, options);
  // An ordinary tensor in every respect: if its storage is resized, it moves to ordinary memory.
  c10::StorageImpl* const storage = tensor.storage().unsafeGetStorageImpl();
  storage->set_allocator(c10::GetCPUAllocator());
  storage->set_resizable(true);
  return tensor;
}

void BoundCommunicator::abort(const py::str& reason, const BoundCommunicator* cause) {
  const std::string text = text_argument(reason);
  py::gil_scoped_release no_gil;
  communicator_->abort(text, cause ? cause->communicator_->failure() : nullptr);
}

void BoundCommunicator::close() {
  const auto warn = [&] {
    const std::string text = communicator_->end_warning();
    return text.empty() || PyErr_WarnEx(PyExc_RuntimeWarning, text.c_str(), 1) == 0;
  };
  try {
    py::gil_scoped_release no_gil;
    communicator_->close(check_signals);
  } catch (...) {
    if (!warn()) PyErr_Clear();  // the failure tells more
    throw;
  }
  if (!warn()) throw py::error_already_set();
}

py::object BoundCommunicator::failure() const { return failure_dict(communicator_->failure()); }

py::list BoundCommunicator::flight_record() const { return flights_list(communicator_->flights()); }

py::dict BoundCommunicator::copy_counters() const {
  return counters_dict(communicator_->copy_counters());
}

std::pair<int, int64_t> BoundCommunicator::nccl_usage() const {
  const DeviceUsage usage = communicator_->device_usage();
  return {usage.num_nccl_comms, usage.num_bytes};
}

// async_op=False: wait() follows at once, on the same thread.
py::class_<BoundCommunicator> bind_communicator(py::module_& m) {
  using Bound = BoundCommunicator;
  return py::class_<Bound>(m, "Communicator",
                           "Over the threads of hosts, or for CUDA tensors over NCCL, controlled "
                           "over the connections of its hosts: see the two constructors.")
      .def(py::init(&make_communicator), py::arg("connections"), py::arg("rank"), py::arg("size"),
           py::arg("channels"), py::arg("timeout"), py::arg("num_threads"),
           py::arg("checks") = true, py::arg("device") = "cpu", py::arg("num_sms") = 0)
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
           py::arg("channel") = py::none(), py::arg("after") = py::none(),
           py::arg("gradient_of") = 0)
      .def("empty", &Bound::empty, py::arg("shape"), py::arg("dtype"))
      .def("refuse", &Bound::refuse, py::arg("op"), py::arg("reason"),
           py::arg("members") = std::vector<int>(), py::arg("channel") = py::none())
      .def("connect", &Bound::connect, py::arg("peers"), py::arg("channels") = py::none(),
           py::arg("direction") = py::none())
      .def("route", &Bound::route, py::arg("peer"))
      .def("abort", &Bound::abort, py::arg("reason"), py::arg("cause") = py::none())
      .def("close", &Bound::close)
      .def("copy_counters", &Bound::copy_counters)
      .def("nccl_usage", &Bound::nccl_usage)
      .def("failure", &Bound::failure)
      .def("flight_record", &Bound::flight_record)
      .def_property_readonly("closed", &Bound::closed)
      .def_property_readonly("failed", &Bound::failed);
}

}  // namespace pipecomm
