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
  TensorRef ref() const;
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

std::unique_ptr<Communicator> join(const std::shared_ptr<local::Hub>& hub,
                                   const CommunicatorOptions& options);

// Runs `body` on a thread and a communicator per rank; an exception is a failed check.
void run_ranks(int size, std::chrono::nanoseconds timeout_of_rank_0,
               const std::function<void(Communicator&, int)>& body,
               const std::shared_ptr<local::Hub>& given = nullptr);

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

void expect_failure(int line, const Failure& failure, FailureKind kind, int origin,
                    const std::string& text);
#define CHECK_FAILURE(failure, kind, origin, text) \
  expect_failure(__LINE__, failure, FailureKind::kind, origin, text)

OperationPtr isend(Communicator& comm, const Tensor& tensor, int peer, int channel = 0);
OperationPtr irecv(Communicator& comm, const Tensor& tensor, int peer, int channel = 0);

}  // namespace threads
