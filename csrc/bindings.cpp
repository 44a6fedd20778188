// The extension module `pipecomm_ext._C`: nothing but bindings.
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/CPUAllocator.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "bindings/plan_bindings.h"
#include "bindings/python_args.h"
#include "bindings/shared_memory.h"
#include "engine/communicator.h"
#include "transport/c10d_transport.h"
#include "transport/shm/shm_transport.h"

namespace pipecomm {
namespace {

// One element of a batch as Python holds it.
struct PointToPointArg {
  py::object tensor;
  int peer;
  int channel;
};
struct SendArg : PointToPointArg {};
struct RecvArg : PointToPointArg {};

template <class Arg>
void bind_point_to_point(py::module_& m, const char* name, const char* doc) {
  py::class_<Arg>(m, name, doc)
      .def(py::init([](py::object tensor, const py::object& peer, const py::object& channel) {
             Arg arg;
             arg.tensor = std::move(tensor);
             arg.peer = index_argument(peer, "peer");
             arg.channel = index_argument(channel, "channel");
             return arg;
           }),
           py::arg("tensor"), py::arg("peer"), py::arg("channel") = 0)
      .def_readonly("tensor", &Arg::tensor)
      .def_readonly("peer", &Arg::peer)
      .def_readonly("channel", &Arg::channel)
      .def("__repr__", [name](const Arg& arg) {
        const bool is_tensor = THPVariable_Check(arg.tensor.ptr());
        return py::str("{}({}, peer={}, channel={})")
            .format(name,
                    is_tensor ? py::str("{}{}").format(arg.tensor.attr("dtype"),
                                                       py::list(arg.tensor.attr("shape")))
                              : py::str(arg.tensor),
                    arg.peer, arg.channel);
      });
}

// A handle on an operation. Owns nothing that the operation does not own itself: dropping it is
// legal.
class Work {
 public:
  Work(std::shared_ptr<Communicator> communicator, OperationPtr operation)
      : communicator_(std::move(communicator)), operation_(std::move(operation)) {}

  void wait(const py::object& timeout) {
    const auto limit = timeout_argument(timeout);
    const Deadline until = limit ? Clock::now() + *limit : Deadline::max();
    bool finished;
    {
      py::gil_scoped_release no_gil;
      finished = communicator_->wait(*operation_, until, check_signals);
    }
    if (finished) return;
    Failure failure{.kind = FailureKind::timeout,
                    .op = op_name(operation_->op()),
                    .rank = communicator_->rank(),
                    .origin_rank = communicator_->rank()};
    if (const RequestPtr request = operation_->first_pending()) failure.peer = request->peer;
    failure.message = failure.op + " is not done after " + py::str(timeout).cast<std::string>() +
                      " s of wait(), " + operation_->pending_text() +
                      "; it stays in flight, wait() again to go on";
    throw PipeCommException(std::make_shared<Failure>(std::move(failure)));
  }
  bool is_completed() const { return operation_->done(); }

 private:
  std::shared_ptr<Communicator> communicator_;
  OperationPtr operation_;
};

// What the engine cannot receive into directly: it gets a contiguous stand-in, copied over at the
// end.
struct StandIns {
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs;  // tensor of the user, stand-in

  at::Tensor contiguous(const at::Tensor& tensor) {
    if (tensor.is_contiguous()) return tensor;
    at::AutoDispatchBelowADInplaceOrView guard;
    pairs.emplace_back(tensor, at::empty(tensor.sizes(), tensor.options()));
    return pairs.back().second;
  }
  std::function<void()> copy_back() && {
    if (pairs.empty()) return nullptr;
    return [pairs = std::move(pairs)] {
      at::AutoDispatchBelowADInplaceOrView guard;
      for (const auto& [tensor, stand_in] : pairs) tensor.copy_(stand_in);
    };
  }
};

class BoundCommunicator {
 public:
  // `shared_memory`, or `backend`, which is None if there is nobody to talk to.
  BoundCommunicator(const py::object& backend, int rank, int size, uint32_t epoch, int num_channels,
                    const py::object& timeout, int num_threads, bool checks,
                    SharedMemory* shared_memory) {
    CommunicatorOptions options;
    options.rank = rank;
    options.size = size;
    options.num_channels = num_channels;
    options.timeout = timeout_argument(timeout);
    options.num_threads = num_threads;
    options.checks = checks;
    auto c10d_backend = backend.is_none() ? c10::intrusive_ptr<c10d::Backend>()
                                          : backend.cast<c10::intrusive_ptr<c10d::Backend>>();
    py::gil_scoped_release no_gil;
    communicator_ = std::make_shared<Communicator>(
        options, [&](TransportEvents& events) -> std::unique_ptr<HostTransport> {
          if (shared_memory)
            return std::make_unique<shm::ShmTransport>(shared_memory->take(), rank, events);
          return std::make_unique<C10dTransport>(std::move(c10d_backend), rank, size, epoch,
                                                 events);
        });
  }
  ~BoundCommunicator() {
    py::gil_scoped_release no_gil;  // threads are joined here
    communicator_.reset();
  }

  Work batch_p2p(const py::sequence& ops) {
    std::vector<PointToPoint> batch;
    const size_t num_ops = py::len(ops);
    batch.reserve(num_ops);
    StandIns stand_ins;
    for (size_t op_idx = 0; op_idx < num_ops; ++op_idx) {
      const py::object op = ops[op_idx];
      const auto at = [&] {
        return num_ops == 1 ? std::string("tensor") : "ops[" + std::to_string(op_idx) + "]: tensor";
      };
      if (py::isinstance<SendArg>(op)) {
        batch.push_back(send_of(op.cast<const SendArg&>(), at()));
      } else if (py::isinstance<RecvArg>(op)) {
        batch.push_back(recv_of(op.cast<const RecvArg&>(), at(), stand_ins));
      } else {
        throw py::type_error("ops[" + std::to_string(op_idx) +
                             "] must be a Send, a Recv or a torch.distributed.P2POp, not " +
                             Py_TYPE(op.ptr())->tp_name);
      }
    }
    return post_p2p(batch, std::move(stand_ins));
  }
  Work isend(const py::object& tensor, const py::object& dst, const py::object& channel) {
    SendArg arg;
    arg.tensor = tensor;
    arg.peer = index_argument(dst, "dst");
    arg.channel = index_argument(channel, "channel");
    return post_p2p({send_of(arg, "tensor")}, {});
  }
  Work irecv(const py::object& tensor, const py::object& src, const py::object& channel) {
    RecvArg arg;
    arg.tensor = tensor;
    arg.peer = index_argument(src, "src");
    arg.channel = index_argument(channel, "channel");
    StandIns stand_ins;
    std::vector<PointToPoint> batch{recv_of(arg, "tensor", stand_ins)};
    return post_p2p(batch, std::move(stand_ins));
  }

  Work broadcast(const py::object& object, const py::object& src) {
    const int source = index_argument(src, "src");
    const bool sends = source == communicator_->rank();
    at::Tensor tensor =
        tensor_argument(object, "tensor", sends ? Access::read : Access::write, at::kCPU);
    StandIns stand_ins;
    if (sends) {
      tensor = tensor.contiguous();
    } else {
      mark_written(tensor);
      tensor = stand_ins.contiguous(tensor);
    }
    const TensorRef ref = tensor_ref(tensor);
    auto copy_back = std::move(stand_ins).copy_back();
    py::gil_scoped_release no_gil;
    return {communicator_, communicator_->broadcast(ref, source, std::move(copy_back))};
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
  Work barrier() {
    py::gil_scoped_release no_gil;
    return {communicator_, communicator_->barrier()};
  }
  Work exchange(const std::string& op, const PreparedExchangePtr& plan, const py::sequence& inputs,
                const py::sequence& outputs) {
    auto refs = [](const py::sequence& tensors, const char* name, Access access) {
      std::vector<TensorRef> refs;
      for (size_t idx = 0; idx < py::len(tensors); ++idx) {
        const std::string label = std::string(name) + "[" + std::to_string(idx) + "]";
        const at::Tensor tensor = tensor_argument(tensors[idx], label, access, at::kCPU);
        if (access == Access::write) mark_written(tensor);
        refs.push_back(tensor_ref(tensor));
      }
      return refs;
    };
    const std::vector<TensorRef> input_refs = refs(inputs, "inputs", Access::read);
    const std::vector<TensorRef> output_refs = refs(outputs, "outputs", Access::write);
    const OpCode code = op_code(op);
    py::gil_scoped_release no_gil;
    return {communicator_, communicator_->exchange(code, plan, input_refs, output_refs)};
  }
  void refuse(const std::string& op, const std::string& reason) {
    py::gil_scoped_release no_gil;
    communicator_->refuse(op_code(op), reason);
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
  py::dict copy_counters() const {
    const CopyCounters counters = communicator_->copy_counters();
    py::dict dict;
    dict["num_exchanges"] = counters.num_exchanges;
    dict["num_passes"] = counters.num_passes;
    dict["num_staging_allocations"] = counters.num_staging_allocations;
    return dict;
  }

 private:
  static OpCode op_code(const std::string& name) {
    for (OpCode op : {OpCode::barrier, OpCode::broadcast, OpCode::all_to_all, OpCode::all_gather,
                      OpCode::exchange, OpCode::relay})
      if (name == op_name(op)) return op;
    throw py::value_error("unknown collective '" + name + "'");
  }

  static PointToPoint send_of(const PointToPointArg& arg, const std::string& name) {
    const at::Tensor tensor = tensor_argument(arg.tensor, name, Access::read, at::kCPU);
    at::NoGradGuard no_grad;
    return {Direction::send, arg.peer, arg.channel, tensor_ref(tensor.contiguous())};
  }
  static PointToPoint recv_of(const PointToPointArg& arg, const std::string& name,
                              StandIns& stand_ins) {
    const at::Tensor tensor = tensor_argument(arg.tensor, name, Access::write, at::kCPU);
    mark_written(tensor);
    return {Direction::recv, arg.peer, arg.channel, tensor_ref(stand_ins.contiguous(tensor))};
  }

  Work post_p2p(const std::vector<PointToPoint>& batch, StandIns stand_ins) {
    auto copy_back = std::move(stand_ins).copy_back();
    py::gil_scoped_release no_gil;
    return {communicator_, communicator_->batch_p2p(batch, std::move(copy_back))};
  }

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
  bind_shared_memory(m);
  bind_point_to_point<SendArg>(
      m, "Send", "Send(tensor, peer, channel=0): an element of batch_p2p; peer is a group rank.");
  bind_point_to_point<RecvArg>(
      m, "Recv", "Recv(tensor, peer, channel=0): an element of batch_p2p; peer is a group rank.");

  py::class_<Work>(m, "Work", R"doc(Handle on an operation in flight.

It keeps nothing alive that the operation does not keep alive itself: dropping it is legal, and the data are delivered.)doc")
      .def("wait", &Work::wait, py::arg("timeout") = py::none(),
           R"doc(Block until the operation is done.

timeout: seconds or a timedelta; None waits as long as the communicator's own timeout allows. Raises PipeCommTimeout when it
passes, and then the operation stays in flight; raises the operation's own error if it failed. Idempotent, from any thread.)doc")
      .def(
          "synchronize", [](Work& work) { work.wait(py::none()); },
          "Block the host until the operation is done.")
      .def("is_completed", &Work::is_completed,
           "Whether the operation has ended, well or not. Never blocks.");

  py::class_<BoundCommunicator>(m, "Communicator")
      .def(py::init<py::object, int, int, uint32_t, int, py::object, int, bool, SharedMemory*>(),
           py::arg("backend"), py::arg("rank"), py::arg("size"), py::arg("epoch"),
           py::arg("channels"), py::arg("timeout"), py::arg("num_threads"),
           py::arg("checks") = true, py::arg("shared_memory") = py::none())
      .def("batch_p2p", &BoundCommunicator::batch_p2p, py::arg("ops"))
      .def("isend", &BoundCommunicator::isend, py::arg("tensor"), py::arg("dst"),
           py::arg("channel") = 0)
      .def("irecv", &BoundCommunicator::irecv, py::arg("tensor"), py::arg("src"),
           py::arg("channel") = 0)
      .def("broadcast", &BoundCommunicator::broadcast, py::arg("tensor"), py::arg("src"))
      .def("barrier", &BoundCommunicator::barrier)
      .def("empty", &BoundCommunicator::empty, py::arg("shape"), py::arg("dtype"))
      .def("exchange", &BoundCommunicator::exchange, py::arg("op"), py::arg("plan"),
           py::arg("inputs"), py::arg("outputs"))
      .def("refuse", &BoundCommunicator::refuse, py::arg("op"), py::arg("reason"))
      .def("abort", &BoundCommunicator::abort, py::arg("reason"))
      .def("close", &BoundCommunicator::close)
      .def("copy_counters", &BoundCommunicator::copy_counters)
      .def_property_readonly("closed", &BoundCommunicator::closed)
      .def_property_readonly("failed", &BoundCommunicator::failed);
}

}  // namespace pipecomm
