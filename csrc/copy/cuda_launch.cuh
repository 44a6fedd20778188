// Launches a kernel with as many blocks as its work needs.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "copy/copy_cuda.h"

namespace pipecomm {

// Threads of a block that shares its multiprocessor with others, and of one that has to fill it
// alone. Kernels are compiled for both (__launch_bounds__(kMaxThreads)).
inline constexpr int kThreads = 256;
inline constexpr int kMaxThreads = 512;

inline int threads_of(const CudaLaunch& launch) {
  return launch.num_sms > 0 ? kMaxThreads : kThreads;
}

// A block for each tile: an H100 distributes blocks better than a loop over tiles does (0.98 of a
// device-to-device copy; with as many blocks as it holds, 0.94). A limit of n multiprocessors is n
// blocks, which cannot occupy more, and loop over the tiles.
template <auto kKernel, typename... Arguments>
cudaError_t launch_blocks(int64_t num_tiles, const CudaLaunch& launch,
                          const Arguments&... arguments) {
  const int64_t num_blocks =
      launch.num_sms > 0 ? std::min<int64_t>(num_tiles, launch.num_sms) : num_tiles;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(num_blocks));
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

// The first error of some calls, all of which are made.
inline cudaError_t first_error(std::initializer_list<cudaError_t> errors) {
  const auto failed = std::find_if(errors.begin(), errors.end(),
                                   [](cudaError_t error) { return error != cudaSuccess; });
  return failed == errors.end() ? cudaSuccess : *failed;
}

}  // namespace pipecomm
