// Enough of CUDA for g++ to compile and run the kernels of csrc/copy on the host: a launch runs all
// threads of all blocks one after another, the blocks in an order that the test chooses. A captured
// launch runs when its graph does.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <random>
#include <utility>
#include <vector>

#define __global__
#define __host__
#define __device__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define CUDART_VERSION 13000

#include "host_runtime.h"

enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount = 16 };

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  dim3() = default;
  explicit dim3(unsigned x_) : x(x_) {}
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct alignas(8) uint2 {
  uint32_t x, y;
};

inline dim3 blockIdx, threadIdx, gridDim, blockDim;

namespace shim {
inline dim3 last_grid, last_block;
inline int num_launches = 0;
inline int num_preloaded = 0;
inline int fail_launch = -1;  // number of the launch that fails
inline std::mt19937 block_order{1};
}  // namespace shim

struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
};
struct cudaFuncAttributes {};

template <typename Kernel>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, Kernel*) {
  ++shim::num_preloaded;
  return cudaSuccess;
}

template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
  if (shim::num_launches++ == shim::fail_launch) return cudaErrorInvalidValue;
  if (config->gridDim.x == 0 || config->blockDim.x == 0) return cudaErrorInvalidValue;
  shim::enqueue(config->stream, [launch = *config, kernel, arguments...] {
    shim::last_grid = ::gridDim = launch.gridDim;
    shim::last_block = ::blockDim = launch.blockDim;
    std::vector<unsigned> blocks(launch.gridDim.x);
    for (unsigned i = 0; i < blocks.size(); ++i) blocks[i] = i;
    std::shuffle(blocks.begin(), blocks.end(), shim::block_order);
    for (unsigned block : blocks) {
      for (unsigned thread = 0; thread < launch.blockDim.x; ++thread) {
        ::blockIdx.x = block;
        ::threadIdx.x = thread;
        kernel(arguments...);
      }
    }
  });
  return cudaSuccess;
}

template <typename T>
T __ldcs(const T* address) {
  return *address;
}
inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, uint32_t shift) {
  return static_cast<uint32_t>(((uint64_t{high} << 32) | low) >> (shift & 31));
}
