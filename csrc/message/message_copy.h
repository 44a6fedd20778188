// The payload of a request: in one piece, or spread over the tensors of an exchange.
#pragma once

#include <cstddef>
#include <cstring>
#include <memory>

#include "copy/copy_cpu.h"
#include "message/operation.h"
#include "plan/inline_vector.h"
#include "plan/lower.h"

namespace pipecomm {

// The memory that the copies of an exchange read and write.
struct ExchangeBuffers {
  InlineVector<const void*, 4> inputs;
  InlineVector<void*, 4> outputs;
  std::shared_ptr<std::byte> send_staging, recv_staging;

  CopyBuffers view() const { return {inputs, outputs, send_staging.get(), recv_staging.get()}; }
};

// A message that is packed while it is sent and unpacked while it is received.
struct MessageCopy {
  std::shared_ptr<const LoweredExchange> exchange;
  const LoweredMessage* message;  // of `exchange`
  std::shared_ptr<const ExchangeBuffers> buffers;
};

// Copy bytes [begin, end) of the payload from their place to `chunk`, and back. Scaled messages are
// cut at multiples of 8 bytes.
inline void read_payload(const Request& send, int64_t begin, int64_t end, std::byte* chunk) {
  if (const MessageCopy* copy = send.copy.get())
    pack_range(*copy->exchange, *copy->message, copy->buffers->view(), begin, end, chunk);
  else if (begin < end)
    std::memcpy(chunk, send.data + begin, static_cast<size_t>(end - begin));
}

inline void write_payload(const Request& recv, int64_t begin, int64_t end, const std::byte* chunk) {
  if (const MessageCopy* copy = recv.copy.get())
    unpack_range(*copy->exchange, *copy->message, copy->buffers->view(), begin, end, chunk);
  else if (begin < end)
    std::memcpy(recv.data + begin, chunk, static_cast<size_t>(end - begin));
}

}  // namespace pipecomm
