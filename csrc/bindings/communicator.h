// Python's communicator. The arguments of its constructor decide where its tensors are and what
// moves them.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "bindings/flight.h"
#include "bindings/point_to_point_args.h"
#include "bindings/prepared_collectives.h"
#include "bindings/python_args.h"
#include "bindings/shared_communicator.h"
#include "bindings/tensor_argument.h"
#include "bindings/work.h"
#include "engine/communicator.h"

namespace pipecomm {

class BoundCommunicator {
 public:
  using WorkPtr = std::shared_ptr<Work>;

  // Takes ownership of the communicator. `on_streams`: its operations run on streams of the device,
  // after what the caller has enqueued and before what follows, so the host need not protect tensors.
  BoundCommunicator(std::unique_ptr<Communicator> communicator, const DeviceArgument& device,
                    bool on_streams)
      : communicator_(shared_with_python(std::move(communicator))),
        device_(device),
        on_streams_(on_streams) {}

  // Without `async_op` they wait, within the same call, and return null.
  WorkPtr batch_p2p(const py::object& ops, const py::object& async_op);
  // A send or a receive, as Arg says: posted, or complete.
  template <class Arg>
  WorkPtr begin(const py::object& tensor, const py::object& peer, const py::object& channel);
  template <class Arg>
  void complete(const py::object& tensor, const py::object& peer, const py::object& channel);
  WorkPtr broadcast(const py::object& tensor, const py::object& src, const py::object& async_op);
  WorkPtr barrier(const py::object& async_op);
  // For contiguous tensors in host memory they run and wait; for others they do nothing and return
  // false. `make` makes the plans, see PreparedCollectives.
  bool all_reduce(const py::object& tensor, const py::object& op, const py::object& make,
                  const py::object& channel);
  bool reduce_scatter(const py::object& output, const py::object& input, const py::object& op,
                      const py::object& make);
  bool all_gather(const py::object& output, const py::object& input, const py::object& make);
  // An all_reduce, reduce, reduce_scatter or all_gather as one operation of the engine. `reduction`
  // is the name of the operator, None for an all_gather; `output` is None if this rank gets nothing.
  // The Work is done without `async_op`.
  WorkPtr reduce(const py::object& op, const py::object& output, const py::object& input,
                 const py::object& reduction, const py::object& root, const py::object& async_op);
  bool can_reduce(const std::string& op, const std::optional<std::string>& reduction,
                  const py::object& dtype) const;
  // With `returns_work` the result is a Work that is done.
  WorkPtr exchange(const py::object& op, const py::object& plan, const py::object& inputs,
                   const py::object& outputs, const py::object& async_op, const py::object& members,
                   const py::object& within, const py::object& channel, const py::object& after,
                   const py::object& gradient_of, const py::object& returns_work);
  void refuse(const std::string& op, const py::str& reason, std::vector<int> members,
              const py::object& channel);
  // Begins to connect to these ranks.
  void connect(const std::vector<int>& peers, const std::optional<std::vector<int>>& channels,
               const std::optional<std::string>& direction);
  void connect_exchanges(std::vector<int> members, const py::object& channel);
  // Name of the transport, "" if it is not decided yet, and the reason, if any.
  std::pair<std::string, std::string> route(int peer) const;
  // A tensor for results, in memory that peers write directly. None if the transport has none.
  py::object empty(const std::vector<int64_t>& shape, const py::object& dtype);
  // `cause`: another communicator of the same ranks, or null.
  void abort(const py::str& reason, const BoundCommunicator* cause);
  void close(py::handle patience);

  bool closed() const { return communicator_->closed(); }
  bool failed() const { return communicator_->failure() != nullptr; }
  py::object failure() const { return failure_dict(communicator_->failure()); }
  py::list flight_record() const { return flights_list(communicator_->flights()); }
  py::list connection_events() const;
  py::dict copy_counters() const {
    return counters_dict(communicator_->execution().copy_counters());
  }
  // The number of NCCL communicators, and the memory of the device that they took.
  std::pair<int, int64_t> nccl_usage() const;

 private:
  class Tensors;
  template <class Arg>
  WorkPtr post_one(const py::object& tensor, const py::object& peer, const py::object& channel,
                   bool async_op);
  WorkPtr post_batch(Tensors tensors, std::span<const PointToPoint> batch, bool async_op);
  bool is_share_of(const TensorRef& piece, const TensorRef& whole) const;
  template <class Post>
  WorkPtr run(Tensors tensors, bool async_op, Post&& post, bool returns_work = false);

  const std::shared_ptr<Communicator> communicator_;
  const DeviceArgument device_;
  const bool on_streams_;
  PreparedCollectives prepared_;
};

// Binds it with a constructor for tensors that hosts move, and one for those that NCCL moves.
py::class_<BoundCommunicator> bind_communicator(py::module_& m);
void bind_nccl_communicator(py::module_& m, py::class_<BoundCommunicator>& communicator);

}  // namespace pipecomm
