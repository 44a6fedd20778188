// Executes copy tasks and means on a CUDA device. No call allocates, synchronises or keeps anything
// of its arguments, so all may be captured in a CUDA graph.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <span>

#include "copy/vector_task.h"

namespace pipecomm {

struct CudaLaunch {
  cudaStream_t stream = nullptr;
  int num_sms = 0;  // multiprocessors to occupy at most; 0: all of the current device
};

// One launch for up to 196 tasks (and per dtype, if scaled), one more for each further 196.
// `tasks` must suit the buffers.
cudaError_t execute_cuda(const ResolvedTasks& tasks, const CopyBuffers& buffers, const Scale& scale,
                         const CudaLaunch& launch);

inline constexpr int kMaxMeanSources = 500;  // whose pointers fit into 4 KiB of kernel arguments

// dst[i] = mean of srcs[k][i] with the arithmetic of reduce_cpu. cudaErrorInvalidValue for a dtype
// that cannot be averaged, for no sources and for more than kMaxMeanSources.
cudaError_t mean_cuda(void* dst, std::span<const void* const> srcs, int64_t count, DType dtype,
                      const CudaLaunch& launch);

// Load all kernels on the current device, so that no first call has to: loading synchronises the
// device and can deadlock with a communication kernel that waits for this rank.
cudaError_t preload_cuda_copy();
cudaError_t preload_cuda_mean();

}  // namespace pipecomm
