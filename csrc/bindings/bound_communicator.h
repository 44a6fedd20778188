// Python's communicator. Where its tensors are, and what moves them, follows from the arguments of
// its constructor: a class derived from this one for each way, which Python does not see.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bindings/flight.h"
#include "bindings/point_to_point_args.h"
#include "bindings/python_args.h"
#include "bindings/work.h"

namespace pipecomm {

class BoundCommunicator {
 public:
  using WorkPtr = std::shared_ptr<Work>;
  virtual ~BoundCommunicator() = default;

  WorkPtr batch_p2p(const py::sequence& ops, bool async_op) {
    return post_p2p(async_op, [&](const View& view) { return batch_argument(ops, view); });
  }
  WorkPtr isend(const py::object& tensor, const py::object& dst, const py::object& channel,
                bool async_op) {
    return post_one<SendArg>(Direction::send, tensor, dst, "dst", channel, async_op);
  }
  WorkPtr irecv(const py::object& tensor, const py::object& src, const py::object& channel,
                bool async_op) {
    return post_one<RecvArg>(Direction::recv, tensor, src, "src", channel, async_op);
  }
  virtual WorkPtr broadcast(const py::object& tensor, const py::object& src, bool async_op) = 0;
  virtual WorkPtr barrier(bool async_op) = 0;
  virtual WorkPtr exchange(const std::string& op, const PreparedExchangePtr& plan,
                           const py::sequence& inputs, const py::sequence& outputs, bool async_op,
                           std::vector<int> members, const py::object& channel,
                           const std::shared_ptr<Work>& after, uint64_t gradient_of) = 0;
  // Begins to connect to these ranks. Over NCCL all are connected.
  virtual void connect(const std::vector<int>& /*peers*/) {}
  // For results, where the transport moves them best.
  virtual at::Tensor empty(const std::vector<int64_t>& shape, at::ScalarType dtype) = 0;
  virtual void refuse(const std::string& op, const std::string& reason, std::vector<int> members,
                      const py::object& channel) = 0;
  virtual void abort(const std::string& reason) = 0;
  virtual void close() = 0;
  virtual bool closed() const = 0;
  virtual bool failed() const = 0;
  virtual py::object failure() const = 0;
  virtual py::list flight_record() const = 0;
  virtual py::dict copy_counters() const = 0;

 protected:
  // What the engine is to see of one message, and the batch of them.
  using View = std::function<PointToPoint(const PointToPointArg& arg, Direction direction,
                                          const std::string& name)>;
  using BatchOf = std::function<std::vector<PointToPoint>(const View& view)>;
  virtual WorkPtr post_p2p(bool async_op, const BatchOf& batch_of) = 0;

 private:
  template <class Arg>
  WorkPtr post_one(Direction direction, const py::object& tensor, const py::object& peer,
                   const char* peer_name, const py::object& channel, bool async_op) {
    const auto arg = point_to_point_arg<Arg>(tensor, peer, peer_name, channel);
    return post_p2p(async_op, [&](const View& view) {
      return std::vector<PointToPoint>{view(arg, direction, "tensor")};
    });
  }
};

// Over an engine, the Work of whose operations is a `Handle`.
template <class Engine, class Handle>
class CommunicatorOver : public BoundCommunicator {
 public:
  void refuse(const std::string& op, const std::string& reason, std::vector<int> members,
              const py::object& channel) override {
    const Scope scope = scope_argument(std::move(members), channel);
    const OpCode code = collective_code(op);
    note_call_site();
    py::gil_scoped_release no_gil;
    communicator_->refuse(code, reason, scope);
  }
  void abort(const std::string& reason) override {
    py::gil_scoped_release no_gil;
    communicator_->abort(reason);
  }
  void close() override {
    py::gil_scoped_release no_gil;
    communicator_->close(check_signals);
  }
  bool closed() const override { return communicator_->closed(); }
  bool failed() const override { return communicator_->failure() != nullptr; }
  py::object failure() const override { return failure_dict(communicator_->failure()); }
  py::list flight_record() const override { return flights_list(communicator_->flights()); }
  py::dict copy_counters() const override { return counters_dict(communicator_->copy_counters()); }

 protected:
  template <class Post>
  WorkPtr work(Post&& post) {
    note_call_site();
    py::gil_scoped_release no_gil;
    return std::make_shared<Handle>(communicator_, post());
  }

  std::shared_ptr<Engine> communicator_;
};

// The constructor of a communicator that is a `Bound` made of `Args`.
template <class Bound, class... Args>
auto made() {
  return py::init([](Args... args) -> std::unique_ptr<BoundCommunicator> {
    return std::make_unique<Bound>(std::forward<Args>(args)...);
  });
}

}  // namespace pipecomm
