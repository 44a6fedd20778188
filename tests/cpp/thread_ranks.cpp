#include "thread_ranks.h"

namespace threads {

TensorRef Tensor::ref() const {
  return {bytes->data(), dtypes::kUInt8, {int64_t(bytes->size())}, {1}, bytes};
}

std::unique_ptr<Communicator> join(const std::shared_ptr<local::Hub>& hub,
                                   const CommunicatorOptions& options) {
  return std::make_unique<Communicator>(options, [&](TransportEvents& events) {
    return std::make_unique<local::Transport>(hub, options.rank, events);
  });
}

void run_ranks(int size, std::chrono::nanoseconds timeout_of_rank_0,
               const std::function<void(Communicator&, int)>& body,
               const std::shared_ptr<local::Hub>& given) {
  const auto hub = given ? given : std::make_shared<local::Hub>(size);
  check::in_threads(size, [&](int rank) {
    try {
      const auto comm = join(hub, options_of(rank, size, rank == 0 ? timeout_of_rank_0 : kLong));
      body(*comm, rank);
    } catch (const std::exception& error) {
      check::fail(__FILE__, __LINE__, "rank " + std::to_string(rank) + ": " + error.what());
    }
  });
}

void expect_failure(int line, const Failure& failure, FailureKind kind, int origin,
                    const std::string& text) {
  if (failure.kind != kind || failure.origin_rank != origin ||
      failure.message.find(text) == std::string::npos)
    check::fail(__FILE__, line,
                "'" + text + "' of rank " + std::to_string(origin) + " expected: kind " +
                    std::to_string(int(failure.kind)) + " of rank " +
                    std::to_string(failure.origin_rank) + ": " + failure.message);
}

OperationPtr isend(Communicator& comm, const Tensor& tensor, int peer, int channel) {
  const PointToPoint op{Direction::send, peer, channel, tensor.ref()};
  return comm.batch_p2p({&op, 1});
}

OperationPtr irecv(Communicator& comm, const Tensor& tensor, int peer, int channel) {
  const PointToPoint op{Direction::recv, peer, channel, tensor.ref()};
  return comm.batch_p2p({&op, 1});
}

}  // namespace threads
