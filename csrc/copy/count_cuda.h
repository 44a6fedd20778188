// Counts how often streams of a CUDA device reach a point, in memory that the host reads.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace pipecomm {

// Adds 1 to a number in pinned memory of the host, in the order of the stream.
cudaError_t count_cuda(uint32_t* counter, cudaStream_t stream);

// See preload_cuda_copy().
cudaError_t preload_cuda_count();

}  // namespace pipecomm
