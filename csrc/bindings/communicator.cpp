#include "bindings/communicator.h"

#include <utility>

#include "bindings/connections.h"
#include "bindings/cuda.h"
#include "bindings/quick_method.h"
#include "engine/reductions.h"

namespace pipecomm {
namespace {

template <class T>
T argument(const py::object& object, const char* name) {
  try {
    return object.cast<T>();
  } catch (const py::cast_error&) {
    throw py::type_error(std::string(name) + " must not be " +
                         py::repr(object).cast<std::string>());
  }
}

bool is_true(const py::object& object) {
  const int truth = PyObject_IsTrue(object.ptr());
  if (truth < 0) throw py::error_already_set();
  return truth != 0;
}

// For tensors in host memory, and for tensors in device memory that are staged through it.
std::unique_ptr<BoundCommunicator> make_communicator(Connections& connections, int rank, int size,
                                                     int num_channels, const py::object& timeout,
                                                     int num_threads, bool checks,
                                                     const std::string& device_name, int num_sms) {
  const auto device = DeviceArgument::parse(device_name);
  CommunicatorOptions options;
  options.rank = rank;
  options.size = size;
  options.num_channels = num_channels;
  options.timeout = timeout_argument(timeout);
  options.num_threads = num_threads;
  options.checks = checks;
  options.on_failure = raise_flight_alarm;
  py::gil_scoped_release no_gil;
  if (device.is_cuda()) options.device = device_runtime(device.index, num_sms);
  auto communicator = std::make_unique<Communicator>(
      options, [&](TransportEvents& events) { return connections.make_transport(events); });
  return std::make_unique<BoundCommunicator>(std::move(communicator), device, false);
}

}  // namespace

using Refs = InlineVector<TensorRef, 4>;

// The tensors of one call, as the engine takes them. Those of an asynchronous operation are checked again
// at its end, unless it runs on streams, whose order then also protects their memory.
class BoundCommunicator::Tensors {
 public:
  Tensors(const BoundCommunicator& communicator, size_t number, bool async_op)
      : device_(communicator.device_) {
    check_not_traced();
    if (number == 0) return;
    if (async_op && !communicator.on_streams_) watch_ = std::make_shared<KeptStorages::Watch>();
    kept_ = KeptStorages::make(number, watch_);
  }

  TensorRef ref(py::handle object, const ArgumentName& name, Access access) {
    TensorArgument argument = tensor_argument(object, name, access, device_);
    kept_->add(std::move(argument.storage), access);
    argument.ref.storage = kept_;
    if (access == Access::write) written_.push_back(std::move(argument.tensor));
    return std::move(argument.ref);
  }
  Refs refs(const py::sequence& tensors, const char* name, Access access) {
    Refs refs;
    for (size_t idx = 0; idx < py::len(tensors); ++idx)
      refs.push_back(ref(tensors[idx], {name, idx}, access));
    return refs;
  }
  template <class Arg>
  PointToPoint point_to_point(const Arg& arg, const ArgumentName& name) {
    constexpr bool kSends = std::is_same_v<Arg, SendArg>;
    return {kSends ? Direction::send : Direction::recv, arg.peer, arg.channel,
            ref(arg.tensor, name, kSends ? Access::read : Access::write), arg.signature};
  }
  // Before the operation begins.
  void mark_written() const {
    if (!written_.empty()) pipecomm::mark_written(written_);
  }
  AwaitedTensors awaited() {
    return watch_ ? AwaitedTensors(kept_, watch_, std::move(written_)) : AwaitedTensors();
  }

 private:
  const DeviceArgument& device_;
  std::shared_ptr<KeptStorages::Watch> watch_;
  std::shared_ptr<KeptStorages> kept_;
  InlineVector<py::object, 8> written_;
};

// A call that waits is a single call from Python: it posts and waits without the GIL.
template <class Post>
BoundCommunicator::WorkPtr BoundCommunicator::run(Tensors tensors, bool async_op, Post&& post,
                                                  bool returns_work) {
  tensors.mark_written();
  note_call_site();
  AwaitedTensors awaited = tensors.awaited();  // none unless `async_op`
  OperationPtr operation;
  {
    const WithoutGil no_gil;
    operation = post();
    if (!async_op) communicator_->follow(*operation, check_signals_of_posted);
    if (!async_op && !returns_work) operation = nullptr;
  }
  if (!operation) return nullptr;
  if (async_op)
    if (const std::string text = communicator_->execution().take_warning(); !text.empty())
      if (PyErr_WarnEx(PyExc_RuntimeWarning, text.c_str(), 1) != 0) throw py::error_already_set();
  return std::make_shared<OperationWork>(communicator_, std::move(operation), std::move(awaited));
}

BoundCommunicator::WorkPtr BoundCommunicator::post_batch(Tensors tensors,
                                                         std::span<const PointToPoint> batch,
                                                         bool async_op) {
  return run(std::move(tensors), async_op,
             [&] { return communicator_->batch_p2p(batch, {async_op, check_signals}); });
}

BoundCommunicator::WorkPtr BoundCommunicator::batch_p2p(const py::object& given,
                                                        const py::object& is_async) {
  if (!PySequence_Check(given.ptr()))
    throw py::type_error(std::string("ops must be a sequence, not ") +
                         Py_TYPE(given.ptr())->tp_name);
  const auto ops = py::reinterpret_borrow<py::sequence>(given);
  const bool async_op = is_true(is_async);
  const PointToPointClasses& classes = point_to_point_classes();
  const size_t num_ops = py::len(ops);
  Tensors tensors(*this, num_ops, async_op);
  InlineVector<PointToPoint, 4> batch;
  for (size_t op_idx = 0; op_idx < num_ops; ++op_idx) {
    const py::object op = ops[op_idx];
    const ArgumentName name =
        num_ops == 1 ? ArgumentName{.element = "tensor"} : ArgumentName{"ops", op_idx, ": tensor"};
    if (const auto* send = as<SendArg>(op, classes.send))
      batch.push_back(tensors.point_to_point(*send, name));
    else if (const auto* recv = as<RecvArg>(op, classes.recv))
      batch.push_back(tensors.point_to_point(*recv, name));
    else
      throw py::type_error(ArgumentName{"ops", op_idx}.text() +
                           " must be a Send, a Recv or a torch.distributed.P2POp, not " +
                           Py_TYPE(op.ptr())->tp_name);
  }
  return post_batch(std::move(tensors), batch, async_op);
}

template <class Arg>
BoundCommunicator::WorkPtr BoundCommunicator::post_one(const py::object& tensor,
                                                       const py::object& peer,
                                                       const py::object& channel, bool async_op) {
  const auto arg = point_to_point_arg<Arg>(tensor, peer, Arg::kPeer, channel);
  Tensors tensors(*this, 1, async_op);
  const PointToPoint message = tensors.point_to_point(arg, {.element = "tensor"});
  return post_batch(std::move(tensors), {&message, 1}, async_op);
}

template <class Arg>
BoundCommunicator::WorkPtr BoundCommunicator::begin(const py::object& tensor,
                                                    const py::object& peer,
                                                    const py::object& channel) {
  return post_one<Arg>(tensor, peer, channel, true);
}

template <class Arg>
void BoundCommunicator::complete(const py::object& tensor, const py::object& peer,
                                 const py::object& channel) {
  post_one<Arg>(tensor, peer, channel, false);
}

BoundCommunicator::WorkPtr BoundCommunicator::broadcast(const py::object& object,
                                                        const py::object& src,
                                                        const py::object& is_async) {
  const bool async_op = is_true(is_async);
  const int source = index_argument(src, "src");
  const bool sends = source == communicator_->rank();
  Tensors tensors(*this, 1, async_op);
  const TensorRef tensor =
      tensors.ref(object, {.element = "tensor"}, sends ? Access::read : Access::write);
  return run(std::move(tensors), async_op,
             [&] { return communicator_->broadcast(tensor, source, {async_op, check_signals}); });
}

BoundCommunicator::WorkPtr BoundCommunicator::barrier(const py::object& is_async) {
  const bool async_op = is_true(is_async);
  return run({*this, 0, async_op}, async_op, [&] { return communicator_->barrier(async_op); });
}

bool BoundCommunicator::all_reduce(const py::object& object, const py::object& op,
                                   const py::object& make, const py::object& channel) {
  if (device_.is_cuda()) return false;
  const Scope second = scope_argument({}, channel);
  Tensors tensors(*this, 1, false);
  const TensorRef tensor = tensors.ref(object, {.element = "tensor"}, Access::write);
  const auto prepared = prepared_.find(*communicator_, object, op, tensor, make);
  if (!prepared) return false;
  tensors.mark_written();
  note_call_site();
  const WithoutGil no_gil;
  pipecomm::all_reduce(*communicator_, tensor, prepared->reduction, prepared->plans, second,
                       check_signals_of_posted);
  return true;
}

bool BoundCommunicator::reduce_scatter(const py::object& output, const py::object& input,
                                       const py::object& op, const py::object& make) {
  if (device_.is_cuda()) return false;
  Tensors tensors(*this, 2, false);
  const TensorRef target = tensors.ref(output, {.element = "output"}, Access::write);
  const TensorRef source = tensors.ref(input, {.element = "input"}, Access::read);
  if (!is_share_of(target, source)) return false;
  const auto prepared = prepared_.find(*communicator_, output, op, target, make);
  if (!prepared) return false;
  tensors.mark_written();
  note_call_site();
  const WithoutGil no_gil;
  pipecomm::reduce_scatter(*communicator_, target, source, prepared->reduction, prepared->plans[0],
                           check_signals_of_posted);
  return true;
}

bool BoundCommunicator::all_gather(const py::object& output, const py::object& input,
                                   const py::object& make) {
  if (device_.is_cuda()) return false;
  Tensors tensors(*this, 2, false);
  const TensorRef source = tensors.ref(input, {.element = "input"}, Access::read);
  const TensorRef target = tensors.ref(output, {.element = "output"}, Access::write);
  if (!is_share_of(source, target)) return false;
  const auto prepared = prepared_.find(*communicator_, input, py::none(), source, make);
  if (!prepared) return false;
  tensors.mark_written();
  note_call_site();
  const WithoutGil no_gil;
  pipecomm::all_gather(*communicator_, target, source, prepared->plans[0], check_signals_of_posted);
  return true;
}

BoundCommunicator::WorkPtr BoundCommunicator::reduce(const py::object& op, const py::object& output,
                                                     const py::object& input,
                                                     const py::object& reduction,
                                                     const py::object& root,
                                                     const py::object& is_async) {
  const bool async_op = is_true(is_async);
  const OpCode code = collective_code(argument<std::string>(op, "op"));
  const auto name = argument<std::optional<std::string>>(reduction, "reduction");
  Tensors tensors(*this, 2, async_op);
  const TensorRef source = tensors.ref(input, {.element = "input"}, Access::read);
  const TensorRef target =
      output.is_none() ? source : tensors.ref(output, {.element = "output"}, Access::write);
  const ReduceCall call{code, source, target, name ? reduction_argument(*name) : Reduction::kSum,
                        index_argument(root, "root")};
  const auto post = [&] { return communicator_->reduce(call, {async_op, check_signals}); };
  return run(std::move(tensors), async_op, post, true);
}

bool BoundCommunicator::can_reduce(const std::string& op,
                                   const std::optional<std::string>& reduction,
                                   const py::object& dtype) const {
  return communicator_->execution().can_reduce(
      collective_code(op), reduction ? reduction_argument(*reduction) : Reduction::kSum,
      dtype_argument(dtype));
}

// Whether both are contiguous and `piece` has as many elements as each rank's piece of `whole`.
bool BoundCommunicator::is_share_of(const TensorRef& piece, const TensorRef& whole) const {
  return piece.dtype == whole.dtype && piece.is_contiguous() && whole.is_contiguous() &&
         piece.num_bytes() * communicator_->size() == whole.num_bytes();
}

BoundCommunicator::WorkPtr BoundCommunicator::exchange(
    const py::object& op, const py::object& plan, const py::object& inputs,
    const py::object& outputs, const py::object& is_async, const py::object& members,
    const py::object& within, const py::object& channel, const py::object& after,
    const py::object& gradient_of, const py::object& returns_work) {
  const bool async_op = is_true(is_async);
  const auto prepared = argument<PreparedExchangePtr>(plan, "plan");
  const auto sources = argument<py::sequence>(inputs, "inputs");
  const auto targets = argument<py::sequence>(outputs, "outputs");
  Tensors tensors(*this, py::len(sources) + py::len(targets), async_op);
  const Refs input_refs = tensors.refs(sources, "inputs", Access::read);
  const Refs output_refs = tensors.refs(targets, "outputs", Access::write);
  const OpCode code = collective_code(argument<std::string>(op, "op"));
  Scope scope = scope_argument(argument<std::vector<int>>(members, "members"), channel);
  scope.within = argument<std::vector<int>>(within, "within");
  scope.gradient_of = argument<uint64_t>(gradient_of, "gradient_of");
  const auto first = argument<std::shared_ptr<Work>>(after, "after");
  const auto* one = dynamic_cast<const OperationWork*>(first.get());
  if (first && (!one || !one->is_of(*communicator_)))
    throw py::type_error("after must be the Work of one exchange of this communicator");
  const auto post = [&] {
    return communicator_->exchange(code, prepared, input_refs, output_refs,
                                   {async_op, check_signals}, scope,
                                   one ? one->operation() : nullptr);
  };
  return run(std::move(tensors), async_op, post, is_true(returns_work));
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

void BoundCommunicator::connect_exchanges(std::vector<int> members, const py::object& channel) {
  const Scope scope = scope_argument(std::move(members), channel);
  py::gil_scoped_release no_gil;
  communicator_->connect(scope);
}

std::pair<std::string, std::string> BoundCommunicator::route(int peer) const {
  const Route route = communicator_->transport().route(peer);
  return {route.transport, route.reason};
}

py::object BoundCommunicator::empty(const std::vector<int64_t>& shape, const py::object& dtype) {
  int64_t num_bytes = dtype_argument(dtype).itemsize;
  for (int64_t length : shape)
    if (length < 0 || __builtin_mul_overflow(num_bytes, length, &num_bytes))
      throw py::value_error("shape must hold lengths >= 0, and not too many elements");
  auto memory = device_.is_cuda() ? nullptr : communicator_->transport().allocate_result(num_bytes);
  const auto type = memory ? dlpack_type(dtype) : std::nullopt;
  return type ? tensor_in(std::move(memory), shape, *type) : py::none();
}

void BoundCommunicator::abort(const py::str& reason, const BoundCommunicator* cause) {
  const std::string text = text_argument(reason);
  py::gil_scoped_release no_gil;
  communicator_->abort(text, cause ? cause->communicator_->failure() : nullptr);
}

void BoundCommunicator::close(py::handle patience) {
  const auto limit = timeout_argument(patience);
  const auto warn = [&] {
    const std::string text = communicator_->execution().end_warning();
    return text.empty() || PyErr_WarnEx(PyExc_RuntimeWarning, text.c_str(), 1) == 0;
  };
  try {
    py::gil_scoped_release no_gil;
    communicator_->close(check_signals, limit);
  } catch (...) {
    if (!warn()) PyErr_Clear();  // the failure is more helpful
    throw;
  }
  if (!warn()) throw py::error_already_set();
}

py::list BoundCommunicator::connection_events() const {
  std::vector<ConnectionEvent> events;
  {
    const py::gil_scoped_release no_gil;
    events = communicator_->connections();
  }
  return connections_list(events);
}

std::pair<int, int64_t> BoundCommunicator::nccl_usage() const {
  const DeviceUsage usage = communicator_->execution().device_usage();
  return {usage.num_nccl_comms, usage.num_bytes};
}

py::class_<BoundCommunicator> bind_communicator(py::module_& m) {
  m.attr("MIN_RESULT_BYTES") = kMinResultBytes;
  m.def(
      "check_tensor",
      [](const py::object& tensor, const std::string& name, const std::string& device,
         bool is_received) {
        check_not_traced();
        tensor_argument(tensor, {.element = name.c_str()},
                        is_received ? Access::write : Access::read, DeviceArgument::parse(device));
      },
      py::arg("tensor"), py::arg("name"), py::arg("device"), py::arg("is_received"),
      "TypeError or ValueError, as of a send or a receive, if a communicator for `device` cannot "
      "move the tensor.");
  using Bound = BoundCommunicator;
  py::class_<Bound> bound(m, "Communicator",
                          "Over the threads of hosts, or for CUDA tensors over NCCL, controlled "
                          "over the connections of its hosts: see the two constructors.");
  def_quick<&Bound::complete<SendArg>>(bound, "send",
                                       "send($self, tensor, dst, channel, /)\n--\n\n");
  def_quick<&Bound::complete<RecvArg>>(bound, "recv",
                                       "recv($self, tensor, src, channel, /)\n--\n\n");
  def_quick<&Bound::batch_p2p>(bound, "batch_p2p", "batch_p2p($self, ops, async_op, /)\n--\n\n");
  def_quick<&Bound::broadcast>(bound, "broadcast",
                               "broadcast($self, tensor, src, async_op, /)\n--\n\n");
  def_quick<&Bound::barrier>(bound, "barrier", "barrier($self, async_op, /)\n--\n\n");
  def_quick<&Bound::all_reduce>(bound, "all_reduce",
                                "all_reduce($self, tensor, op, make, channel, /)\n--\n\n");
  def_quick<&Bound::reduce_scatter>(bound, "reduce_scatter",
                                    "reduce_scatter($self, output, input, op, make, /)\n--\n\n");
  def_quick<&Bound::all_gather>(bound, "all_gather",
                                "all_gather($self, output, input, make, /)\n--\n\n");
  def_quick<&Bound::reduce>(
      bound, "reduce", "reduce($self, op, output, input, reduction, root, async_op, /)\n--\n\n");
  def_quick<&Bound::exchange>(bound, "exchange",
                              "exchange($self, op, plan, inputs, outputs, async_op, members, "
                              "within, channel, after, gradient_of, returns_work, /)\n--\n\n");
  bound
      .def(py::init(&make_communicator), py::arg("connections"), py::arg("rank"), py::arg("size"),
           py::arg("channels"), py::arg("timeout"), py::arg("num_threads"),
           py::arg("checks") = true, py::arg("device") = "cpu", py::arg("num_sms") = 0)
      .def("isend", &Bound::begin<SendArg>, py::arg("tensor"), py::arg("dst"),
           py::arg("channel") = 0)
      .def("irecv", &Bound::begin<RecvArg>, py::arg("tensor"), py::arg("src"),
           py::arg("channel") = 0)
      .def("empty", &Bound::empty, py::arg("shape"), py::arg("dtype"))
      .def("can_reduce", &Bound::can_reduce, py::arg("op"), py::arg("reduction"), py::arg("dtype"))
      .def("refuse", &Bound::refuse, py::arg("op"), py::arg("reason"),
           py::arg("members") = std::vector<int>(), py::arg("channel") = py::none())
      .def("connect", &Bound::connect, py::arg("peers"), py::arg("channels") = py::none(),
           py::arg("direction") = py::none())
      .def("connect_exchanges", &Bound::connect_exchanges, py::arg("members"),
           py::arg("channel") = py::none())
      .def("route", &Bound::route, py::arg("peer"))
      .def("abort", &Bound::abort, py::arg("reason"), py::arg("cause") = py::none())
      .def("close", &Bound::close, py::arg("patience") = py::none())
      .def("copy_counters", &Bound::copy_counters)
      .def("nccl_usage", &Bound::nccl_usage)
      .def("failure", &Bound::failure)
      .def("flight_record", &Bound::flight_record)
      .def("connection_events", &Bound::connection_events)
      .def_property_readonly("closed", &Bound::closed)
      .def_property_readonly("failed", &Bound::failed);
  return bound;
}

}  // namespace pipecomm
