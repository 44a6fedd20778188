// What Python holds of an operation in flight.
#pragma once

#include <string>

#include "bindings/python_args.h"

namespace pipecomm {

// Owns nothing that the operation does not own itself: dropping it is legal.
class Work {
 public:
  virtual ~Work() = default;
  // Until `timeout` passes (PipeCommTimeout, and the operation stays in flight); None is the
  // communicator's own limit.
  virtual void wait(const py::object& timeout) = 0;
  virtual void synchronize() = 0;
  virtual bool is_completed() = 0;
};

// On an operation of a host communicator.
class HostWork final : public Work {
 public:
  HostWork(std::shared_ptr<Communicator> communicator, OperationPtr operation)
      : communicator_(std::move(communicator)), operation_(std::move(operation)) {}
  void wait(const py::object& timeout) override;
  void synchronize() override { wait(py::none()); }
  bool is_completed() override { return operation_->done(); }

 private:
  std::shared_ptr<Communicator> communicator_;
  OperationPtr operation_;
};

void bind_work(py::module_& m);

// PipeCommTimeout of a wait(), not of the operation; `state` says what it is waiting for.
[[noreturn]] void throw_still_in_flight(OpCode op, int rank, int peer, const py::object& timeout,
                                        const std::string& state);

// "all_to_all" -> OpCode::all_to_all
OpCode collective_code(const std::string& name);

py::dict counters_dict(const CopyCounters& counters);

}  // namespace pipecomm
