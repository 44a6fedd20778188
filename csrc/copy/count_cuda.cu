#include "copy/count_cuda.h"

#include "copy/cuda_launch.cuh"

namespace pipecomm {

namespace {

// Atomic, because two graphs with the same operation may run at once. The host only reads, so the bus
// need not support atomic operations.
__global__ void count_kernel(uint32_t* counter) { atomicAdd_system(counter, 1u); }

}  // namespace

cudaError_t count_cuda(uint32_t* counter, cudaStream_t stream) {
  cudaLaunchConfig_t config = {};
  config.gridDim = config.blockDim = dim3(1);
  config.stream = stream;
  return cudaLaunchKernelEx(&config, count_kernel, counter);
}

cudaError_t preload_cuda_count() { return preload<count_kernel>(); }

}  // namespace pipecomm
