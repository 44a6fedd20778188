// One kernel runs all tasks of a launch: its blocks take tiles of them, a tile never spans two tasks.
#include "copy/copy_cuda.h"

#include "copy/cuda_launch.cuh"
#include "copy/cuda_tile.cuh"

namespace pipecomm {

namespace {

// Descriptors travel as kernel arguments: nothing to allocate, to upload or to keep alive, and a
// captured graph holds its own. 4 KiB is what every driver takes, 32 KiB what CUDA 12.1 added.
constexpr int kFewTasks = 4;
constexpr int kSomeTasks = 24;
#if CUDART_VERSION >= 12010
constexpr int kManyTasks = 196;
#else
constexpr int kManyTasks = kSomeTasks;
#endif

template <int kCapacity>
struct TaskBatch {
  int32_t num_tasks = 0;
  uint32_t end_tile[kCapacity];  // tiles of the launch up to the end of each task
  VectorTask tasks[kCapacity];

  // The task of a tile, which is not before `begin`.
  __device__ __forceinline__ int task_of(uint32_t tile, int begin) const {
    int end = num_tasks - 1;
    while (begin < end) {
      const int middle = (begin + end) / 2;
      if (end_tile[middle] <= tile) {
        begin = middle + 1;
      } else {
        end = middle;
      }
    }
    return begin;
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
    if (task.in_pieces) return move_pieces(task, tile, *this);
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

  __device__ __forceinline__ uint4 operator()(uint4 vector) const { return vector; }

  // The end of a run.
  __device__ __forceinline__ void operator()(const VectorTask& task, const Piece& piece) const {
    switch (task.vector_bytes) {
      case 8:
        return piece.move_units<8>(Identity{});
      case 4:
        return piece.move_units<4>(Identity{});
      case 2:
        return piece.move_units<2>(Identity{});
      default:
        return piece.move_units<1>(Identity{});
    }
  }
};

template <typename Format>
struct ScaledTile {
  static constexpr int kElementBytes = sizeof(typename Format::Storage);
  ScaleVector<Format> op;

  explicit ScaledTile(const Scale& scale) : op{Scaling<typename Format::Compute>(scale)} {}

  __device__ __forceinline__ void operator()(const VectorTask& task, uint32_t tile) const {
    if (task.in_pieces) return move_pieces(task, tile, *this);
    const TileVectors vectors(task, tile);
    if (task.vector_bytes == 16) {
      vectors.template move<16>(op);
    } else {
      vectors.template move<kElementBytes>(op);
    }
  }

  __device__ __forceinline__ uint4 operator()(uint4 vector) const { return op(vector); }

  __device__ __forceinline__ void operator()(const VectorTask&, const Piece& piece) const {
    piece.move_units<kElementBytes>(op);
  }
};

template <int kCapacity, typename Tile>
__global__ void __launch_bounds__(kMaxThreads)
    copy_kernel(const __grid_constant__ TaskBatch<kCapacity> batch, const Tile move) {
  const uint32_t num_tiles = batch.end_tile[batch.num_tasks - 1];
  int task = 0;  // a block's tiles only grow
  for (uint32_t tile = blockIdx.x; tile < num_tiles; tile += gridDim.x) {
    if (tile >= batch.end_tile[task]) task = batch.task_of(tile, task + 1);
    move(batch.tasks[task], task == 0 ? tile : tile - batch.end_tile[task - 1]);
  }
}

// ---- launching ----

// Tasks [begin, end) of `tasks`, which have one kind of arithmetic.
struct TaskRange {
  const ResolvedTasks& tasks;
  const CopyBuffers& buffers;
  size_t begin, end;
};

int64_t num_tiles_of(int64_t num_vectors, const CudaLaunch& launch) {
  const int64_t tile_vectors = int64_t{kVectorsPerThread} * threads_of(launch);
  return (num_vectors + tile_vectors - 1) / tile_vectors;
}

// Launches the first tasks of the range: as many as the capacity takes, with fewer than 2^31 tiles.
template <int kCapacity, typename Tile>
cudaError_t launch_batch(TaskRange& range, const Tile& tile, const CudaLaunch& launch) {
  TaskBatch<kCapacity> batch;
  int64_t num_tiles = 0;
  for (; range.begin < range.end && batch.num_tasks < kCapacity; ++range.begin) {
    const int64_t more_tiles = num_tiles_of(range.tasks.num_vectors(range.begin), launch);
    if (num_tiles + more_tiles >= int64_t{1} << 31) break;
    num_tiles += more_tiles;
    batch.tasks[batch.num_tasks] = range.tasks.at(range.begin, range.buffers);
    batch.end_tile[batch.num_tasks++] = static_cast<uint32_t>(num_tiles);
  }
  return launch_blocks<copy_kernel<kCapacity, Tile>>(num_tiles, launch, batch, tile);
}

template <typename Tile>
cudaError_t launch_all(TaskRange range, const Tile& tile, const CudaLaunch& launch) {
  while (range.begin < range.end) {
    const size_t num_tasks = range.end - range.begin;
    const cudaError_t error = num_tasks <= kFewTasks ? launch_batch<kFewTasks>(range, tile, launch)
                              : num_tasks <= kSomeTasks
                                  ? launch_batch<kSomeTasks>(range, tile, launch)
                                  : launch_batch<kManyTasks>(range, tile, launch);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t launch_range(const TaskRange& range, const Scale& scale, const CudaLaunch& launch) {
  switch (range.tasks.arithmetic(range.begin)) {
    case Arithmetic::kFloat16:
      return launch_all(range, ScaledTile<Float16>(scale), launch);
    case Arithmetic::kBFloat16:
      return launch_all(range, ScaledTile<BFloat16>(scale), launch);
    case Arithmetic::kFloat32:
      return launch_all(range, ScaledTile<Float32>(scale), launch);
    case Arithmetic::kFloat64:
      return launch_all(range, ScaledTile<Float64>(scale), launch);
    case Arithmetic::kBytes:
      break;
  }
  return range.tasks.are_aligned(range.begin, range.end) ? launch_all(range, AlignedTile{}, launch)
                                                         : launch_all(range, AnyTile{}, launch);
}

template <typename Tile>
cudaError_t preload_tile() {
  return first_error({preload<copy_kernel<kFewTasks, Tile>>(),
                      preload<copy_kernel<kSomeTasks, Tile>>(),
                      preload<copy_kernel<kManyTasks, Tile>>()});
}

}  // namespace

// One launch for each kind of arithmetic, and an exchange hardly ever has two.
cudaError_t execute_cuda(const ResolvedTasks& tasks, const CopyBuffers& buffers, const Scale& scale,
                         const CudaLaunch& launch) {
  for (size_t begin = 0, end; begin < tasks.size(); begin = end) {
    end = begin + 1;
    while (end < tasks.size() && tasks.arithmetic(end) == tasks.arithmetic(begin)) ++end;
    const cudaError_t error = launch_range({tasks, buffers, begin, end}, scale, launch);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t preload_cuda_copy() {
  return first_error({preload_tile<AlignedTile>(), preload_tile<AnyTile>(),
                      preload_tile<ScaledTile<Float16>>(), preload_tile<ScaledTile<BFloat16>>(),
                      preload_tile<ScaledTile<Float32>>(), preload_tile<ScaledTile<Float64>>()});
}

}  // namespace pipecomm
