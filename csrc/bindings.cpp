// The extension module `pipecomm_ext._C`: nothing but bindings.
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/CPUAllocator.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "bindings/device_bindings.h"
#include "bindings/flight.h"
#include "bindings/host_copies.h"
#include "bindings/mean.h"
#include "bindings/plan_bindings.h"
#include "bindings/point_to_point_args.h"
#include "bindings/python_args.h"
#include "bindings/shared_memory.h"
#include "bindings/work.h"
#include "engine/communicator.h"
#include "transport/c10d_transport.h"
#include "transport/shm/shm_transport.h"

namespace pipecomm {
namespace {

class BoundCommunicator {
 public:
  using WorkPtr = std::shared_ptr<Work>;

  // `shared_memory`, or `backend`, which is None if there is nobody to talk to.
  BoundCommunicator(const py::object& backend, int rank, int size, uint32_t epoch, int num_channels,
                    const py::object& timeout, int num_threads, bool checks,
                    SharedMemory* shared_memory, const std::string& device)
      : device_(c10::Device(device).type()) {
    CommunicatorOptions options;
    options.rank = rank;
    options.size = size;
    options.num_channels = num_channels;
    options.timeout = timeout_argument(timeout);
    options.num_threads = num_threads;
    options.checks = checks;
    options.on_failure = raise_flight_alarm;
    auto c10d_backend = backend.is_none() ? c10::intrusive_ptr<c10d::Backend>()
                                          : backend.cast<c10::intrusive_ptr<c10d::Backend>>();
    py::gil_scoped_release no_gil;
    communicator_ = shared_with_python(
        new Communicator(options, [&](TransportEvents& events) -> std::unique_ptr<HostTransport> {
          if (shared_memory)
            return std::make_unique<shm::ShmTransport>(shared_memory->take(), rank, events);
          return std::make_unique<C10dTransport>(std::move(c10d_backend), rank, size, epoch,
                                                 events);
        }));
  }

  WorkPtr batch_p2p(const py::sequence& ops, bool async_op) {
    StandIns stand_ins;
    const auto batch = batch_argument(
        ops, [&](const PointToPointArg& arg, Direction direction, const std::string& name) {
          return view(arg, direction, name, stand_ins);
        });
    return post_p2p(batch, std::move(stand_ins), async_op);
  }
  WorkPtr isend(const py::object& tensor, const py::object& dst, const py::object& channel,
                bool async_op) {
    const auto arg = point_to_point_arg<SendArg>(tensor, dst, "dst", channel);
    StandIns stand_ins;
    const PointToPoint op = view(arg, Direction::send, "tensor", stand_ins);
    return post_p2p({&op, 1}, std::move(stand_ins), async_op);
  }
  WorkPtr irecv(const py::object& tensor, const py::object& src, const py::object& channel,
                bool async_op) {
    const auto arg = point_to_point_arg<RecvArg>(tensor, src, "src", channel);
    StandIns stand_ins;
    const PointToPoint op = view(arg, Direction::recv, "tensor", stand_ins);
    return post_p2p({&op, 1}, std::move(stand_ins), async_op);
  }

  WorkPtr broadcast(const py::object& object, const py::object& src, bool async_op) {
    const int source = index_argument(src, "src");
    const bool sends = source == communicator_->rank();
    StandIns stand_ins;
    const TensorRef tensor = ref(object, "tensor", sends ? Access::read : Access::write, stand_ins);
    return work([&] {
      return communicator_->broadcast(tensor, source, std::move(stand_ins).copy_back(), async_op);
    });
  }
  // For results: in memory that peers write directly, if the transport has such memory.
  at::Tensor empty(const std::vector<int64_t>& shape, at::ScalarType dtype) {
    const at::TensorOptions options = at::TensorOptions().dtype(dtype);
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
  WorkPtr barrier(bool async_op) {
    return work([&] { return communicator_->barrier(async_op); });
  }
  WorkPtr exchange(const std::string& op, const PreparedExchangePtr& plan,
                   const py::sequence& inputs, const py::sequence& outputs, bool async_op,
                   std::vector<int> members, const py::object& channel,
                   const std::shared_ptr<Work>& after) {
    StandIns stand_ins;
    auto refs = [&](const py::sequence& tensors, const char* name, Access access) {
      std::vector<TensorRef> refs;
      for (size_t idx = 0; idx < py::len(tensors); ++idx) {
        const std::string label = std::string(name) + "[" + std::to_string(idx) + "]";
        // Tensors in host memory are read and written by their strides.
        if (device_ == at::kCPU) {
          const at::Tensor tensor = tensor_argument(tensors[idx], label, access, device_);
          if (access == Access::write) mark_written(tensor);
          refs.push_back(tensor_ref(tensor));
        } else {
          refs.push_back(ref(tensors[idx], label, access, stand_ins));
        }
      }
      return refs;
    };
    const std::vector<TensorRef> input_refs = refs(inputs, "inputs", Access::read);
    const std::vector<TensorRef> output_refs = refs(outputs, "outputs", Access::write);
    const OpCode code = collective_code(op);
    const Scope scope = scope_argument(std::move(members), channel);
    const auto* first = after ? dynamic_cast<const HostWork*>(after.get()) : nullptr;
    if (after && !first) throw py::type_error("after must be the Work of one exchange");
    return work([&] {
      return communicator_->exchange(code, plan, input_refs, output_refs,
                                     std::move(stand_ins).copy_back(), async_op, scope,
                                     first ? first->operation() : nullptr);
    });
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
  // What the transport reads or writes for a tensor of the user.
  TensorRef ref(const py::object& object, const std::string& name, Access access,
                StandIns& stand_ins) const {
    const at::Tensor tensor = tensor_argument(object, name, access, device_);
    if (access == Access::read) return tensor_ref(on_host(tensor));
    mark_written(tensor);
    return tensor_ref(stand_ins.for_tensor(tensor));
  }
  PointToPoint view(const PointToPointArg& arg, Direction direction, const std::string& name,
                    StandIns& stand_ins) const {
    const Access access = direction == Direction::send ? Access::read : Access::write;
    return {direction, arg.peer, arg.channel, ref(arg.tensor, name, access, stand_ins),
            arg.signature};
  }

  template <class Post>
  WorkPtr work(Post&& post) {
    note_call_site();
    py::gil_scoped_release no_gil;
    return std::make_shared<HostWork>(communicator_, post());
  }
  WorkPtr post_p2p(std::span<const PointToPoint> batch, StandIns stand_ins, bool async_op) {
    return work([&] {
      return communicator_->batch_p2p(batch, std::move(stand_ins).copy_back(), async_op);
    });
  }

  const at::DeviceType device_;
  std::shared_ptr<Communicator> communicator_;
};

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "C++ core of pipecomm_ext; use the Python package instead.";

  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const PipeCommException& error) {
      raise_failure(*error.failure());
    }
  });

  bind_plan(m);
  bind_mean(m);
  bind_shared_memory(m);
  bind_point_to_point_args(m);
  bind_work(m);
  bind_flight(m);
  bind_device(m);

  py::class_<BoundCommunicator>(m, "Communicator")
      .def(py::init<py::object, int, int, uint32_t, int, py::object, int, bool, SharedMemory*,
                    std::string>(),
           py::arg("backend"), py::arg("rank"), py::arg("size"), py::arg("epoch"),
           py::arg("channels"), py::arg("timeout"), py::arg("num_threads"),
           py::arg("checks") = true, py::arg("shared_memory") = py::none(),
           py::arg("device") = "cpu")
      // async_op=False: wait() follows at once, on the same thread.
      .def("batch_p2p", &BoundCommunicator::batch_p2p, py::arg("ops"), py::arg("async_op") = false)
      .def("isend", &BoundCommunicator::isend, py::arg("tensor"), py::arg("dst"),
           py::arg("channel") = 0, py::arg("async_op") = true)
      .def("irecv", &BoundCommunicator::irecv, py::arg("tensor"), py::arg("src"),
           py::arg("channel") = 0, py::arg("async_op") = true)
      .def("broadcast", &BoundCommunicator::broadcast, py::arg("tensor"), py::arg("src"),
           py::arg("async_op") = false)
      .def("barrier", &BoundCommunicator::barrier, py::arg("async_op") = false)
      .def("empty", &BoundCommunicator::empty, py::arg("shape"), py::arg("dtype"))
      .def("exchange", &BoundCommunicator::exchange, py::arg("op"), py::arg("plan"),
           py::arg("inputs"), py::arg("outputs"), py::arg("async_op") = false,
           py::arg("members") = std::vector<int>(), py::arg("channel") = py::none(),
           py::arg("after") = py::none())
      .def("refuse", &BoundCommunicator::refuse, py::arg("op"), py::arg("reason"),
           py::arg("members") = std::vector<int>(), py::arg("channel") = py::none())
      .def("abort", &BoundCommunicator::abort, py::arg("reason"))
      .def("close", &BoundCommunicator::close)
      .def("copy_counters", &BoundCommunicator::copy_counters)
      .def("failure", &BoundCommunicator::failure)
      .def("flight_record", &BoundCommunicator::flight_record)
      .def_property_readonly("closed", &BoundCommunicator::closed)
      .def_property_readonly("failed", &BoundCommunicator::failed);
}

}  // namespace pipecomm
