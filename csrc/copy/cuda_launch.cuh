// Launches a kernel with as many blocks as its work needs and the device holds at once.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>

#include "copy/copy_cuda.h"

namespace pipecomm {

// A block that shares its multiprocessor with others, and one that has to fill it alone. Kernels
// are compiled for both (__launch_bounds__(kMaxThreads)).
inline constexpr int kThreads = 256;
inline constexpr int kMaxThreads = 512;

inline int threads_of(const CudaLaunch& launch) {
  return launch.num_sms > 0 ? kMaxThreads : kThreads;
}

// How many blocks of kThreads the current device holds. Asked once per kernel and device, since the
// answer takes some microseconds.
template <auto kKernel>
cudaError_t resident_blocks(int device, int num_sms, int* num_blocks) {
  static std::array<std::atomic<int>, 64> known{};
  const bool can_keep = device < static_cast<int>(known.size());
  *num_blocks = can_keep ? known[device].load() : 0;
  if (*num_blocks > 0) return cudaSuccess;
  int per_sm = 0;
  const cudaError_t error =
      cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, kKernel, kThreads, 0);
  *num_blocks = num_sms * std::max(per_sm, 1);
  if (error == cudaSuccess && can_keep) known[device] = *num_blocks;
  return error;
}

// At most `max_blocks` of threads_of(launch), which go from tile to tile. A limit of n
// multiprocessors is n blocks, which cannot lie on more.
template <auto kKernel, typename... Arguments>
cudaError_t launch_blocks(int64_t max_blocks, const CudaLaunch& launch,
                          const Arguments&... arguments) {
  int num_sms = 0, device = 0, num_blocks = launch.num_sms;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess && num_blocks == 0)
    error = resident_blocks<kKernel>(device, num_sms, &num_blocks);
  if (error != cudaSuccess) return error;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(std::min<int64_t>(max_blocks, num_blocks)));
  config.blockDim = dim3(static_cast<unsigned>(threads_of(launch)));
  config.stream = launch.stream;
  return cudaLaunchKernelEx(&config, kKernel, arguments...);
}

// Loads a kernel on the current device without running it.
template <auto kKernel>
cudaError_t preload() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, kKernel);
}

// The first failure of some calls, all of which are made.
inline cudaError_t first_error(std::initializer_list<cudaError_t> errors) {
  const auto failed = std::find_if(errors.begin(), errors.end(),
                                   [](cudaError_t error) { return error != cudaSuccess; });
  return failed == errors.end() ? cudaSuccess : *failed;
}

}  // namespace pipecomm
