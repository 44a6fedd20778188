// The memory that copy tasks refer to.
#pragma once

#include <span>

#include "plan/lower.h"

namespace pipecomm {

// Addresses of the first element of each tensor, and of the first byte of each staging buffer.
struct CopyBuffers {
  std::span<const void* const> inputs;
  std::span<void* const> outputs;
  void* send_staging = nullptr;
  const void* recv_staging = nullptr;
};

inline const char* source_of(const CopyTask& task, const CopyBuffers& buffers) {
  const void* base =
      task.src_tensor_idx < 0 ? buffers.recv_staging : buffers.inputs[task.src_tensor_idx];
  return static_cast<const char*>(base) + task.src_offset_bytes;
}

inline char* destination_of(const CopyTask& task, const CopyBuffers& buffers) {
  void* base =
      task.dst_tensor_idx < 0 ? buffers.send_staging : buffers.outputs[task.dst_tensor_idx];
  return static_cast<char*>(base) + task.dst_offset_bytes;
}

}  // namespace pipecomm
