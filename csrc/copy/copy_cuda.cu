// One kernel runs all tasks of a launch: its blocks take tiles of them, a tile never spans two tasks.
#include "copy/copy_cuda.h"

#include "copy/cuda_launch.cuh"
#include "copy/cuda_tile.cuh"

namespace pipecomm {

namespace {

// Descriptors are kernel arguments: nothing to allocate, upload or keep alive, and a captured graph
// holds its own. Every driver accepts 4 KiB of arguments; since CUDA 12.1 32 KiB are possible.
constexpr int kFewTasks = 4;
constexpr int kSomeTasks = 24;
#if CUDART_VERSION >= 12010
constexpr int kManyTasks = 196;
#else
constexpr int kManyTasks = kSomeTasks;
#endif

// The tasks of a group take turns: the boxes of one tensor interleave in memory, and blocks that run
// at the same time should read and write the same pages of it.
template <int kCapacity>
struct TaskBatch {
  int32_t num_groups = 0;
  uint32_t first_tile[kCapacity + 1];  // of each group, and the end of the last one
  uint8_t first_task[kCapacity + 1];   // the same
  VectorTask tasks[kCapacity];
  static_assert(kCapacity <= UINT8_MAX);

  __device__ __forceinline__ int group_of(uint32_t tile) const {
    int begin = 0, end = num_groups;
    while (end - begin > 1) {
      const int middle = (begin + end) / 2;
      if (first_tile[middle] <= tile) {
        begin = middle;
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
    if (task.in_pieces)
      move_pieces(task, tile, *this);
    else
      move_turns(task, tile, *this);
  }

  __device__ __forceinline__ void operator()(const TileVectors& vectors) const {
    switch (vectors.task.vector_bytes) {
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
    if (task.in_pieces)
      move_pieces(task, tile, *this);
    else
      move_turns(task, tile, *this);
  }

  __device__ __forceinline__ void operator()(const TileVectors& vectors) const {
    if (vectors.task.vector_bytes == 16) {
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
  const uint32_t num_tiles = batch.first_tile[batch.num_groups];
  for (uint32_t tile = blockIdx.x; tile < num_tiles; tile += gridDim.x) {
    const int group = batch.group_of(tile);
    const uint32_t tile_of_group = tile - batch.first_tile[group];
    const uint32_t first = batch.first_task[group];
    const uint32_t num_tasks = batch.first_task[group + 1] - first;
    const uint32_t tile_of_task = tile_of_group / num_tasks;
    move(batch.tasks[first + tile_of_group - tile_of_task * num_tasks], tile_of_task);
  }
}

// ---- launching ----

// Tasks [begin, end) of `tasks`, which have one kind of arithmetic.
struct TaskRange {
  const ResolvedTasks& tasks;
  const CopyBuffers& buffers;
  size_t begin, end;
};

// Shorter tasks of a group get blocks without work for the tiles they lack: at most a quarter of the
// number of tiles.
bool may_take_turns(int64_t num_tasks, int64_t longest, int64_t num_tiles) {
  return 4 * num_tasks * longest <= 5 * num_tiles;
}

// Launches the first tasks of the range: as many as fit the capacity and fewer than 2^31 tiles.
template <int kCapacity, typename Tile>
cudaError_t launch_batch(TaskRange& range, const Tile& tile, const CudaLaunch& launch) {
  TaskBatch<kCapacity> batch;
  int num_tasks = 0;
  int64_t num_tiles = 0;  // of the launch
  while (range.begin < range.end && num_tasks < kCapacity) {
    const size_t first = range.begin;
    int64_t longest = 0, sum = 0;  // tiles of the group
    size_t end = first;
    for (; end < range.end && num_tasks + int(end - first) < kCapacity; ++end) {
      const int64_t more = range.tasks.num_tiles(end, threads_of(launch));
      const bool joins = end == first || (range.tasks.lie_together(first, end) &&
                                          may_take_turns(int64_t(end - first) + 1,
                                                         std::max(longest, more), sum + more));
      if (!joins) break;
      longest = std::max(longest, more);
      sum += more;
    }
    const int64_t more_tiles = longest * int64_t(end - first);
    if (num_tiles + more_tiles >= int64_t{1} << 31) break;
    batch.first_tile[batch.num_groups] = static_cast<uint32_t>(num_tiles);
    batch.first_task[batch.num_groups++] = static_cast<uint8_t>(num_tasks);
    num_tiles += more_tiles;
    for (; range.begin < end; ++range.begin)
      batch.tasks[num_tasks++] = range.tasks.at(range.begin, range.buffers);
  }
  batch.first_tile[batch.num_groups] = static_cast<uint32_t>(num_tiles);
  batch.first_task[batch.num_groups] = static_cast<uint8_t>(num_tasks);
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

// One launch for each kind of arithmetic; an exchange rarely has two.
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
