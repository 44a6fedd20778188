// The mean of tensors on a device, with the arithmetic of reduce_cpu.
#include "copy/copy_cuda.h"

#include "copy/cuda_arithmetic.cuh"
#include "copy/cuda_launch.cuh"

namespace pipecomm {

namespace {

struct MeanSources {
  int32_t num_sources;
  const void* pointers[kMaxMeanSources];
};

// kElements neighbouring elements at `first`.
template <typename Format, int kElements, typename Compute>
__device__ __forceinline__ void mean_vector(void* dst, const MeanSources& sources, int64_t first,
                                            const Scaling<Compute>& divide) {
  using Storage = typename Format::Storage;
  using Vector = typename VectorOf<kElements * sizeof(Storage)>::Type;
  Storage elements[kElements];
  Compute sums[kElements] = {};
#pragma unroll 4
  for (int k = 0; k < sources.num_sources; ++k) {
    const auto* source = static_cast<const Storage*>(sources.pointers[k]);
    const Vector vector = load_once<Vector>(source + first);
    memcpy(elements, &vector, sizeof(vector));
#pragma unroll
    for (int i = 0; i < kElements; ++i) sums[i] += Format::load(elements[i]);
  }
  divide(sums);
#pragma unroll
  for (int i = 0; i < kElements; ++i) elements[i] = Format::store(sums[i]);
  Vector vector;
  memcpy(&vector, elements, sizeof(vector));
  *reinterpret_cast<Vector*>(static_cast<Storage*>(dst) + first) = vector;
}

// The first num_vectors * 16 bytes in vectors, the rest element by element.
template <typename Format>
__global__ void __launch_bounds__(kMaxThreads)
    mean_kernel(void* dst, const __grid_constant__ MeanSources sources,
                const Scaling<typename Format::Compute> divide, int64_t num_vectors,
                int64_t count) {
  constexpr int kElements = 16 / sizeof(typename Format::Storage);
  const int64_t thread = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const int64_t num_threads = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = thread; i < num_vectors; i += num_threads)
    mean_vector<Format, kElements>(dst, sources, i * kElements, divide);
  for (int64_t i = num_vectors * kElements + thread; i < count; i += num_threads)
    mean_vector<Format, 1>(dst, sources, i, divide);
}

template <typename Format>
cudaError_t launch_mean(void* dst, std::span<const void* const> srcs, int64_t count,
                        const CudaLaunch& launch) {
  constexpr int64_t kElements = 16 / sizeof(typename Format::Storage);
  MeanSources sources = {};
  sources.num_sources = static_cast<int32_t>(srcs.size());
  std::copy(srcs.begin(), srcs.end(), sources.pointers);
  auto address_bits = reinterpret_cast<uintptr_t>(dst);
  for (const void* src : srcs) address_bits |= reinterpret_cast<uintptr_t>(src);
  const int64_t num_vectors = address_bits % 16 == 0 ? count / kElements : 0;
  const int64_t num_threads = std::max(num_vectors, count - num_vectors * kElements);
  const Scaling<typename Format::Compute> divide(Scale::divide(double(srcs.size())));
  const int64_t threads = threads_of(launch);
  return launch_blocks<mean_kernel<Format>>((num_threads + threads - 1) / threads, launch, dst,
                                            sources, divide, num_vectors, count);
}

}  // namespace

cudaError_t mean_cuda(void* dst, std::span<const void* const> srcs, int64_t count, DType dtype,
                      const CudaLaunch& launch) {
  if (srcs.empty() || srcs.size() > kMaxMeanSources) return cudaErrorInvalidValue;
  const Arithmetic arithmetic = arithmetic_of(dtype);
  if (arithmetic == Arithmetic::kBytes) return cudaErrorInvalidValue;
  if (count == 0) return cudaSuccess;
  switch (arithmetic) {
    case Arithmetic::kFloat16:
      return launch_mean<Float16>(dst, srcs, count, launch);
    case Arithmetic::kBFloat16:
      return launch_mean<BFloat16>(dst, srcs, count, launch);
    case Arithmetic::kFloat32:
      return launch_mean<Float32>(dst, srcs, count, launch);
    default:
      return launch_mean<Float64>(dst, srcs, count, launch);
  }
}

cudaError_t preload_cuda_mean() {
  return first_error({preload<mean_kernel<Float16>>(), preload<mean_kernel<BFloat16>>(),
                      preload<mean_kernel<Float32>>(), preload<mean_kernel<Float64>>()});
}

}  // namespace pipecomm
