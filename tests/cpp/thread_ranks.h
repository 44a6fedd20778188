// Communicators of several threads as ranks, over a transport in memory.
#pragma once

#include "check.h"
#include "engine/communicator.h"
#include "local_transport.h"

namespace threads {

inline constexpr auto kLong = 60s;  // hard limit of anything that must not hang

// A tensor of bytes with a storage of its own.
struct Tensor {
  explicit Tensor(int64_t num_bytes, int fill = 0xee)
      : bytes(std::make_shared<std::vector<std::byte>>(num_bytes, static_cast<std::byte>(fill))) {}
  TensorRef ref() const {
    return {bytes->data(), dtypes::kUInt8, {int64_t(bytes->size())}, {1}, bytes};
  }
  std::shared_ptr<std::vector<std::byte>> bytes;
};

inline Tensor patterned(int64_t num_bytes, uint64_t seed) {
  Tensor tensor(num_bytes);
  for (int64_t idx = 0; idx < num_bytes; ++idx)
    (*tensor.bytes)[idx] = static_cast<std::byte>((seed * 131 + idx * 7 + idx / 251) & 0xff);
  return tensor;
}

inline int direct_limit = kDirectLimit;

inline CommunicatorOptions options_of(int rank, int size,
                                      std::chrono::nanoseconds timeout = kLong) {
  return {.rank = rank,
          .size = size,
          .num_channels = 3,
          .timeout = timeout,
          .direct_limit = direct_limit};
}

inline std::unique_ptr<Communicator> join(const std::shared_ptr<local::Hub>& hub,
                                          const CommunicatorOptions& options) {
  return std::make_unique<Communicator>(options, [&](TransportEvents& events) {
    return std::make_unique<local::Transport>(hub, options.rank, events);
  });
}

// Runs `body` on a thread and a communicator per rank; an exception is a failed check.
inline void run_ranks(int size, std::chrono::nanoseconds timeout_of_rank_0,
                      const std::function<void(Communicator&, int)>& body,
                      const std::shared_ptr<local::Hub>& given = nullptr) {
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

inline void wait(Communicator& comm, const OperationPtr& operation) {
  if (!comm.wait(*operation, Clock::now() + kLong, nullptr))
    throw std::runtime_error("still pending: " + operation->pending_text());
}

// The failure that `call` ends with.
inline Failure failure_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const PipeCommException& error) {
    return *error.failure();
  }
  return {.message = "(no failure)"};
}

inline void expect_failure(int line, const Failure& failure, FailureKind kind, int origin,
                           const std::string& text) {
  if (failure.kind != kind || failure.origin_rank != origin ||
      failure.message.find(text) == std::string::npos)
    check::fail(__FILE__, line,
                "'" + text + "' of rank " + std::to_string(origin) + " expected: kind " +
                    std::to_string(int(failure.kind)) + " of rank " +
                    std::to_string(failure.origin_rank) + ": " + failure.message);
}
#define CHECK_FAILURE(failure, kind, origin, text) \
  expect_failure(__LINE__, failure, FailureKind::kind, origin, text)

inline OperationPtr isend(Communicator& comm, const Tensor& tensor, int peer, int channel = 0) {
  const PointToPoint op{Direction::send, peer, channel, tensor.ref()};
  return comm.batch_p2p({&op, 1});
}
inline OperationPtr irecv(Communicator& comm, const Tensor& tensor, int peer, int channel = 0) {
  const PointToPoint op{Direction::recv, peer, channel, tensor.ref()};
  return comm.batch_p2p({&op, 1});
}

}  // namespace threads
