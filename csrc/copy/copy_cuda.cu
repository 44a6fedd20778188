// One kernel runs all tasks: blocks take tiles of kTileVectors vectors, a tile never spans two
// tasks. Within a tile a thread starts all its loads before its first store, so that they overlap.
// Sources are read once and marked so (ld.cs); results stay in the L2 cache for whoever comes next.
#include "copy/copy_cuda.h"

#include <cuda_runtime.h>

#include <algorithm>

#include "copy/float_formats.h"
#include "copy/vector_task.h"

namespace pipecomm {

namespace {

// Descriptors travel as kernel arguments: nothing to allocate, to upload or to keep alive, and a
// captured graph holds its own. 4 KiB is what every driver takes, 32 KiB what CUDA 12.1 added.
constexpr int kFewTasks = 4000 / sizeof(VectorTask);
#if CUDART_VERSION >= 12010
constexpr int kManyTasks = 32000 / sizeof(VectorTask);
#else
constexpr int kManyTasks = kFewTasks;
#endif

template <int kCapacity>
struct TaskBatch {
  uint32_t num_tiles;
  int32_t num_tasks;
  VectorTask tasks[kCapacity];

  // The last task whose first tile is not behind `tile`.
  __device__ __forceinline__ const VectorTask& task_of(uint32_t tile) const {
    int begin = 0, end = num_tasks;
    while (end - begin > 1) {
      const int middle = (begin + end) / 2;
      if (tasks[middle].first_tile <= tile) {
        begin = middle;
      } else {
        end = middle;
      }
    }
    return tasks[begin];
  }
};

template <int kBytes>
struct VectorOf;
template <>
struct VectorOf<16> {
  using Type = uint4;
};
template <>
struct VectorOf<8> {
  using Type = uint2;
};
template <>
struct VectorOf<4> {
  using Type = uint32_t;
};
template <>
struct VectorOf<2> {
  using Type = uint16_t;
};
template <>
struct VectorOf<1> {
  using Type = uint8_t;
};

struct Identity {
  template <typename Vector>
  __device__ __forceinline__ Vector operator()(Vector vector) const {
    return vector;
  }
};

template <typename Format>
struct ScaleVector {
  typename Format::Compute factor;
  bool is_division;

  template <typename Vector>
  __device__ __forceinline__ Vector operator()(Vector vector) const {
    using Storage = typename Format::Storage;
    constexpr int kCount = sizeof(Vector) / sizeof(Storage);
    Storage elements[kCount];
    memcpy(elements, &vector, sizeof(Vector));
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const auto value = Format::load(elements[i]);
      elements[i] = Format::store(is_division ? value / factor : value * factor);
    }
    memcpy(&vector, elements, sizeof(Vector));
    return vector;
  }
};

// What one thread moves of a tile. Vectors behind the end of the task are absent.
struct TileVectors {
  const char* src[kTileVectorsPerThread];
  char* dst[kTileVectorsPerThread];
  bool exists[kTileVectorsPerThread];

  __device__ __forceinline__ TileVectors(const VectorTask& task, uint32_t tile) {
    const uint32_t first = (tile - task.first_tile) * kTileVectors + threadIdx.x;
#pragma unroll
    for (int i = 0; i < kTileVectorsPerThread; ++i) {
      const uint32_t vector = first + i * kTileThreads;
      exists[i] = vector < task.num_vectors;
      const VectorOffsets offsets = task.offsets_of(exists[i] ? vector : 0);
      src[i] = task.src + offsets.src_bytes;
      dst[i] = task.dst + offsets.dst_bytes;
    }
  }

  template <int kVectorBytes, typename Op>
  __device__ __forceinline__ void move(const Op& op) const {
    using Vector = typename VectorOf<kVectorBytes>::Type;
    Vector vectors[kTileVectorsPerThread];
#pragma unroll
    for (int i = 0; i < kTileVectorsPerThread; ++i) {
      if (exists[i]) vectors[i] = __ldcs(reinterpret_cast<const Vector*>(src[i]));
    }
#pragma unroll
    for (int i = 0; i < kTileVectorsPerThread; ++i) {
      if (exists[i]) __stwb(reinterpret_cast<Vector*>(dst[i]), op(vectors[i]));
    }
  }
};

// Every vector has 16 bytes.
struct AlignedTile {
  __device__ __forceinline__ void operator()(const VectorTask& task, uint32_t tile) const {
    TileVectors(task, tile).move<16>(Identity{});
  }
};

struct AnyTile {
  __device__ __forceinline__ void operator()(const VectorTask& task, uint32_t tile) const {
    const TileVectors vectors(task, tile);
    switch (task.vector_bytes) {
      case 16:
        return vectors.move<16>(Identity{});
      case 8:
        return vectors.move<8>(Identity{});
      case 4:
        return vectors.move<4>(Identity{});
      case 2:
        return vectors.move<2>(Identity{});
      default:
        return vectors.move<1>(Identity{});
    }
  }
};

template <typename Format>
struct ScaledTile {
  ScaleVector<Format> op;

  explicit ScaledTile(const Scale& scale)
      : op{static_cast<typename Format::Compute>(scale.factor),
           scale.kind == Scale::Kind::kDivide} {}

  __device__ __forceinline__ void operator()(const VectorTask& task, uint32_t tile) const {
    const TileVectors vectors(task, tile);
    if (task.vector_bytes == 16) {
      vectors.template move<16>(op);
    } else {
      vectors.template move<sizeof(typename Format::Storage)>(op);
    }
  }
};

template <int kCapacity, typename Tile>
__global__ void __launch_bounds__(kTileThreads)
    copy_kernel(const __grid_constant__ TaskBatch<kCapacity> batch, const Tile copy) {
  for (uint32_t tile = blockIdx.x; tile < batch.num_tiles; tile += gridDim.x) {
    copy(batch.task_of(tile), tile);
  }
}

struct MeanSources {
  int32_t num_sources;
  const void* pointers[kMaxMeanSources];
};

// kElements neighbouring elements at `first`.
template <typename Format, int kElements>
__device__ __forceinline__ void mean_vector(void* dst, const MeanSources& sources, int64_t first) {
  using Storage = typename Format::Storage;
  using Vector = typename VectorOf<kElements * sizeof(Storage)>::Type;
  Storage elements[kElements];
  float sums[kElements] = {};
  for (int k = 0; k < sources.num_sources; ++k) {
    const auto* source = static_cast<const Storage*>(sources.pointers[k]);
    const Vector vector = __ldcs(reinterpret_cast<const Vector*>(source + first));
    memcpy(elements, &vector, sizeof(vector));
#pragma unroll
    for (int i = 0; i < kElements; ++i) sums[i] += static_cast<float>(Format::load(elements[i]));
  }
#pragma unroll
  for (int i = 0; i < kElements; ++i) {
    elements[i] = Format::store(sums[i] / static_cast<float>(sources.num_sources));
  }
  Vector vector;
  memcpy(&vector, elements, sizeof(vector));
  __stwb(reinterpret_cast<Vector*>(static_cast<Storage*>(dst) + first), vector);
}

// The first num_vectors * 16 bytes in vectors, the rest element by element.
template <typename Format>
__global__ void __launch_bounds__(kTileThreads)
    mean_kernel(void* dst, const __grid_constant__ MeanSources sources, int64_t num_vectors,
                int64_t count) {
  constexpr int kElements = 16 / sizeof(typename Format::Storage);
  const int64_t thread = int64_t{blockIdx.x} * kTileThreads + threadIdx.x;
  const int64_t num_threads = int64_t{gridDim.x} * kTileThreads;
  for (int64_t i = thread; i < num_vectors; i += num_threads) {
    mean_vector<Format, kElements>(dst, sources, i * kElements);
  }
  for (int64_t i = num_vectors * kElements + thread; i < count; i += num_threads) {
    mean_vector<Format, 1>(dst, sources, i);
  }
}

// ---- launching ----

template <typename... Parameters, typename... Arguments>
cudaError_t launch_blocks(void (*kernel)(Parameters...), int64_t max_blocks,
                          const CudaLaunch& launch, const Arguments&... arguments) {
  int num_sms = 0, device = 0;
  if (cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  if (cudaError_t error = cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
      error != cudaSuccess) {
    return error;
  }
  if (launch.num_sms > 0) num_sms = std::min(num_sms, launch.num_sms);
  constexpr int64_t kBlocksPerSm = 2048 / kTileThreads;  // every thread that a multiprocessor holds
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(std::min(max_blocks, num_sms * kBlocksPerSm)));
  config.blockDim = dim3(kTileThreads);
  config.stream = launch.stream;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

template <int kCapacity, typename Tile>
cudaError_t launch_batch(std::span<VectorTask> tasks, const Tile& tile, const CudaLaunch& launch) {
  TaskBatch<kCapacity> batch;
  batch.num_tasks = static_cast<int32_t>(tasks.size());
  batch.num_tiles = static_cast<uint32_t>(number_tiles(tasks));
  std::copy(tasks.begin(), tasks.end(), batch.tasks);
  return launch_blocks(copy_kernel<kCapacity, Tile>, batch.num_tiles, launch, batch, tile);
}

// How many of the tasks fit in one launch: their number, and 2^31 tiles.
size_t batch_size(std::span<const VectorTask> tasks) {
  size_t size = 0;
  int64_t num_tiles = 0;
  while (size < tasks.size() && size < kManyTasks) {
    num_tiles += tasks[size].num_vectors / kTileVectors + 1;
    if (size > 0 && num_tiles >= int64_t{1} << 31) break;
    ++size;
  }
  return size;
}

template <typename Tile>
cudaError_t launch_all(std::span<VectorTask> tasks, const Tile& tile, const CudaLaunch& launch) {
  while (!tasks.empty()) {
    const std::span<VectorTask> batch = tasks.first(batch_size(tasks));
    const cudaError_t error = batch.size() <= kFewTasks
                                  ? launch_batch<kFewTasks>(batch, tile, launch)
                                  : launch_batch<kManyTasks>(batch, tile, launch);
    if (error != cudaSuccess) return error;
    tasks = tasks.subspan(batch.size());
  }
  return cudaSuccess;
}

// Tasks that all have the arithmetic of the first.
cudaError_t launch_arithmetic(std::span<VectorTask> tasks, const Scale& scale,
                              const CudaLaunch& launch) {
  switch (tasks.front().arithmetic) {
    case Arithmetic::kFloat16:
      return launch_all(tasks, ScaledTile<Float16>(scale), launch);
    case Arithmetic::kBFloat16:
      return launch_all(tasks, ScaledTile<BFloat16>(scale), launch);
    case Arithmetic::kFloat32:
      return launch_all(tasks, ScaledTile<Float32>(scale), launch);
    case Arithmetic::kFloat64:
      return launch_all(tasks, ScaledTile<Float64>(scale), launch);
    case Arithmetic::kBytes:
      break;
  }
  const bool is_aligned = std::all_of(
      tasks.begin(), tasks.end(), [](const VectorTask& task) { return task.vector_bytes == 16; });
  return is_aligned ? launch_all(tasks, AlignedTile{}, launch)
                    : launch_all(tasks, AnyTile{}, launch);
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
  return launch_blocks(mean_kernel<Format>, (num_threads + kTileThreads - 1) / kTileThreads, launch,
                       dst, sources, num_vectors, count);
}

template <typename... Parameters>
cudaError_t preload(void (*kernel)(Parameters...)) {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, kernel);
}

template <typename Tile>
cudaError_t preload_tile() {
  const cudaError_t error = preload(copy_kernel<kFewTasks, Tile>);
  return error != cudaSuccess ? error : preload(copy_kernel<kManyTasks, Tile>);
}

}  // namespace

cudaError_t execute_cuda(std::span<const CopyTask> tasks, const CopyBuffers& buffers,
                         const Scale& scale, const CudaLaunch& launch) {
  std::vector<VectorTask> resolved = vector_tasks(tasks, buffers);
  // One launch for each kind of arithmetic, and an exchange hardly ever has two.
  std::stable_sort(resolved.begin(), resolved.end(), [](const VectorTask& a, const VectorTask& b) {
    return a.arithmetic < b.arithmetic;
  });
  std::span<VectorTask> rest = resolved;
  while (!rest.empty()) {
    const auto end = std::find_if(rest.begin(), rest.end(), [&](const VectorTask& task) {
      return task.arithmetic != rest.front().arithmetic;
    });
    const std::span<VectorTask> same = rest.first(end - rest.begin());
    const cudaError_t error = launch_arithmetic(same, scale, launch);
    if (error != cudaSuccess) return error;
    rest = rest.subspan(same.size());
  }
  return cudaSuccess;
}

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

cudaError_t preload_cuda_copy() {
  const cudaError_t errors[] = {
      preload_tile<AlignedTile>(),         preload_tile<AnyTile>(),
      preload_tile<ScaledTile<Float16>>(), preload_tile<ScaledTile<BFloat16>>(),
      preload_tile<ScaledTile<Float32>>(), preload_tile<ScaledTile<Float64>>(),
      preload(mean_kernel<Float16>),       preload(mean_kernel<BFloat16>),
      preload(mean_kernel<Float32>),       preload(mean_kernel<Float64>),
  };
  const auto failed = std::find_if(std::begin(errors), std::end(errors),
                                   [](cudaError_t error) { return error != cudaSuccess; });
  return failed == std::end(errors) ? cudaSuccess : *failed;
}

}  // namespace pipecomm
