#include "bindings/work.h"

#include <algorithm>

namespace pipecomm {

namespace {

// A handle that is written in Python.
class PythonWork final : public Work {
 public:
  void wait(const py::object& timeout) override {
    PYBIND11_OVERRIDE_PURE(void, Work, wait, timeout);
  }
  void synchronize() override { PYBIND11_OVERRIDE_PURE(void, Work, synchronize); }
  bool is_completed() override { PYBIND11_OVERRIDE_PURE(bool, Work, is_completed); }
  // Steps on the host lie between its operations, which no graph repeats.
  bool is_captured() const override { return false; }
};

}  // namespace

void OperationWork::wait(const py::object& timeout) {
  if (const auto limit = timeout_argument(timeout))
    return block_until(Clock::now() + *limit, timeout);
  {
    const WithoutGil no_gil;
    communicator_->follow(*operation_, check_signals);
  }
  finish_tensors();
}

bool OperationWork::is_completed() {
  bool is_completed;
  {
    const WithoutGil no_gil;
    is_completed = communicator_->is_completed(*operation_);
  }
  if (is_completed && !operation_->failure()) awaited_.finish();
  return is_completed;
}

void OperationWork::finish_tensors() {
  if (awaited_.finish()) return;
  const int rank = communicator_->rank();
  throw PipeCommException(Failure{
      .message = std::string("the storage of a tensor was reallocated (share_memory_(), resize_()) "
                             "while ") +
                 op_name(operation_->op()) +
                 " was in flight, so the message is lost; do that before the operation or after "
                 "its wait()",
      .op = op_name(operation_->op()),
      .rank = rank,
      .origin_rank = rank});
}

void OperationWork::block_until(Deadline until, const py::object& timeout) {
  bool finished;
  {
    const WithoutGil no_gil;
    finished = communicator_->wait(*operation_, until, check_signals);
  }
  if (finished) return finish_tensors();
  std::vector<FlightMessage> pending;
  if (auto flight = operation_->pending_flight()) pending = std::move(flight->messages);
  std::erase_if(pending,
                [](const FlightMessage& message) { return message.state == MessageState::done; });
  throw_still_in_flight(operation_->op(), communicator_->rank(), pending, timeout);
}

void JoinedWork::wait(const py::object& timeout) {
  const auto limit = timeout_argument(timeout);
  const Deadline until = limit ? Clock::now() + *limit : Deadline::max();
  for (const auto& work : works_) {
    if (!limit) {
      work->wait(timeout);
      continue;
    }
    constexpr double kLeastSeconds = 1e-3;  // enough to see that a work is done
    const std::chrono::duration<double> left = until - Clock::now();
    work->wait(py::float_(std::max(left.count(), kLeastSeconds)));
  }
}

void JoinedWork::synchronize() {
  for (const auto& work : works_) work->synchronize();
}

bool JoinedWork::is_completed() {
  return std::all_of(works_.begin(), works_.end(),
                     [](const auto& work) { return work->is_completed(); });
}

bool JoinedWork::is_captured() const {
  return std::ranges::any_of(works_, [](const auto& work) { return work->is_captured(); });
}

Scope scope_argument(std::vector<int> members, const py::object& channel) {
  if (channel.is_none()) return {std::move(members)};
  return {std::move(members), index_argument(channel, "channel")};
}

void bind_work(py::module_& m) {
  py::class_<Work, PythonWork, std::shared_ptr<Work>>(
      m, "Work", "Handle on an operation in flight; documented in pipecomm_ext/_C.pyi.")
      .def(py::init<>())
      .def("wait", &Work::wait, py::arg("timeout") = py::none())
      .def("synchronize", &Work::synchronize)
      .def("is_completed", &Work::is_completed)
      .def_property_readonly("is_captured", &Work::is_captured)
      .def_property_readonly("number", &Work::number);
  m.def(
      "join_works",
      [](std::vector<std::shared_ptr<Work>> works) -> std::shared_ptr<Work> {
        if (works.size() == 1) return works.front();
        return std::make_shared<JoinedWork>(std::move(works));
      },
      py::arg("works"), "One handle on several operations.");
  m.def(
      "timeout_seconds",
      [](const py::object& timeout) -> std::optional<double> {
        const auto limit = timeout_argument(timeout);
        if (!limit) return std::nullopt;
        return std::chrono::duration<double>(*limit).count();
      },
      py::arg("timeout"), "A timeout (seconds or a timedelta) in seconds; None: no limit.");
}

void throw_still_in_flight(OpCode op, int rank, std::span<const FlightMessage> pending,
                           const py::object& timeout) {
  constexpr size_t kMaxNamed = 4;
  Failure failure{
      .kind = FailureKind::timeout, .op = op_name(op), .rank = rank, .origin_rank = rank};
  if (!pending.empty()) name_message(failure, pending[0].peer, pending[0].descriptor);
  std::string text =
      failure.op + " is not done after " + py::str(timeout).cast<std::string>() + " s of wait()";
  for (size_t idx = 0; idx < std::min(pending.size(), kMaxNamed); ++idx) {
    const FlightMessage& message = pending[idx];
    text += (idx == 0 ? ", this rank is waiting for " : ", ") +
            message_text(message.direction, message.peer, message.descriptor) + " of " +
            message.descriptor.text();
  }
  if (pending.size() > kMaxNamed)
    text += " and " + std::to_string(pending.size() - kMaxNamed) + " more";
  failure.message = text + "; it stays in flight, wait() again to go on";
  throw PipeCommException(std::move(failure));
}

OpCode collective_code(const std::string& name) {
  if (const auto op = op_code(name); op && op != OpCode::p2p) return *op;
  throw py::value_error("unknown collective '" + name + "'");
}

py::dict counters_dict(const CopyCounters& counters) {
  py::dict dict;
  dict["num_exchanges"] = counters.num_exchanges;
  dict["num_passes"] = counters.num_passes;
  dict["num_staging_allocations"] = counters.num_staging_allocations;
  return dict;
}

}  // namespace pipecomm
