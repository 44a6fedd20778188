// The memory that copy tasks refer to.
#pragma once

#include <span>

namespace pipecomm {

// Tensors are given by the address of their first element, staging buffers by that of their first
// byte.
struct CopyBuffers {
  std::span<const void* const> inputs;
  std::span<void* const> outputs;
  void* send_staging = nullptr;
  const void* recv_staging = nullptr;
};

}  // namespace pipecomm
