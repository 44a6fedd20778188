// Executes copy tasks on a CUDA device. No call allocates, synchronises or keeps state, so all may
// be captured in a CUDA graph.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <span>

#include "copy/copy_buffers.h"
#include "plan/lower.h"

namespace pipecomm {

struct CudaLaunch {
  cudaStream_t stream = nullptr;
  int num_sms = 0;  // multiprocessors to occupy at most; 0: all of the current device
};

// One launch for up to 200 tasks (and per dtype, if scaled), one more for each further 200.
cudaError_t execute_cuda(std::span<const CopyTask> tasks, const CopyBuffers& buffers,
                         const Scale& scale, const CudaLaunch& launch);

inline constexpr int kMaxMeanSources = 64;

// dst[i] = mean of srcs[k][i] with the arithmetic of mean_cpu. cudaErrorInvalidValue for a dtype
// that cannot be averaged, for no sources and for more than kMaxMeanSources.
cudaError_t mean_cuda(void* dst, std::span<const void* const> srcs, int64_t count, DType dtype,
                      const CudaLaunch& launch);

// Loads every kernel of this file on the current device, so that no first call does: loading
// synchronises the device and can deadlock with a communication kernel that is waiting for us.
cudaError_t preload_cuda_copy();

}  // namespace pipecomm
