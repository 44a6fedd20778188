// Python's handle of an operation in flight.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "bindings/python_args.h"
#include "bindings/tensor_argument.h"
#include "engine/communicator.h"
#include "message/flight_record.h"

namespace pipecomm {

// Owns only what the operation owns itself, so it may be dropped.
class Work {
 public:
  virtual ~Work() = default;
  // Waits until `timeout` passes (PipeCommTimeout; the operation stays in flight); None is the
  // communicator's own limit.
  virtual void wait(const py::object& timeout) = 0;
  virtual void synchronize() = 0;
  virtual bool is_completed() = 0;
  virtual bool is_captured() const = 0;
  virtual uint64_t number() const { return 0; }
};

class OperationWork final : public Work {
 public:
  OperationWork(std::shared_ptr<Communicator> communicator, OperationPtr operation,
                AwaitedTensors awaited)
      : communicator_(std::move(communicator)),
        operation_(std::move(operation)),
        awaited_(std::move(awaited)) {}
  void wait(const py::object& timeout) override;
  void synchronize() override { block_until(Deadline::max(), py::none()); }
  bool is_completed() override;
  bool is_captured() const override { return operation_->is_captured(); }
  uint64_t number() const override { return operation_->number_of_collective(); }
  const OperationPtr& operation() const { return operation_; }
  bool is_of(const Communicator& communicator) const {
    return communicator_.get() == &communicator;
  }

 private:
  void block_until(Deadline until, const py::object& timeout);
  void finish_tensors();

  std::shared_ptr<Communicator> communicator_;
  OperationPtr operation_;
  AwaitedTensors awaited_;  // until they are finished
};

// A handle of several operations at once.
class JoinedWork final : public Work {
 public:
  explicit JoinedWork(std::vector<std::shared_ptr<Work>> works) : works_(std::move(works)) {}
  void wait(const py::object& timeout) override;
  void synchronize() override;
  bool is_completed() override;
  bool is_captured() const override;

 private:
  const std::vector<std::shared_ptr<Work>> works_;
};

// The part of a communicator's ranks that `members` (empty: all) and `channel` (None: the order of
// the collectives) name.
Scope scope_argument(std::vector<int> members, const py::object& channel);

void bind_work(py::module_& m);

// Throws the PipeCommTimeout of a wait(), not of the operation; it names the `pending` messages.
[[noreturn]] void throw_still_in_flight(OpCode op, int rank, std::span<const FlightMessage> pending,
                                        const py::object& timeout);

// "all_to_all" -> OpCode::all_to_all
OpCode collective_code(const std::string& name);

py::dict counters_dict(const CopyCounters& counters);

}  // namespace pipecomm
