// Executes copy tasks on the host.
#pragma once

#include <cstdint>
#include <span>

#include "copy/copy_buffers.h"
#include "copy/thread_pool.h"
#include "plan/lower.h"

namespace pipecomm {

// Runs all tasks. Large jobs are spread over the pool's threads; without a pool, or for small ones,
// the calling thread does everything.
void execute_cpu(std::span<const CopyTask> tasks, const CopyBuffers& buffers, const Scale& scale,
                 ThreadPool* pool = nullptr);

// Writes bytes [begin, end) of a message to `chunk`, or reads them from there, without staging:
// scaled and gathered from the inputs, or scattered to the outputs. Works for staged messages and
// for those that lie in a tensor. Padding between tensors is left unwritten. Scaled messages are
// cut at multiples of 8 bytes.
void pack_range(const LoweredExchange& exchange, const LoweredMessage& send,
                const CopyBuffers& buffers, int64_t begin, int64_t end, void* chunk);
void unpack_range(const LoweredExchange& exchange, const LoweredMessage& recv,
                  const CopyBuffers& buffers, int64_t begin, int64_t end, const void* chunk);

}  // namespace pipecomm
