// A tile of a task: the block's threads move kVectorsPerThread vectors each. A thread starts all its
// loads before its first store, so that they overlap.
#pragma once

#include "copy/cuda_arithmetic.cuh"
#include "copy/cuda_vectors.cuh"
#include "copy/vector_task.h"

namespace pipecomm {

// Some vectors of a task, a block's width apart. Those beyond its end do not exist; the first vector
// of the task is read instead. (Registers that are never written would be allocated separately.)
template <int kCount>
struct ThreadVectors {
  VectorPlace places[kCount];
  bool exists[kCount];

  __device__ __forceinline__ ThreadVectors(const VectorTask& task, uint32_t first) {
    uint32_t vectors[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      vectors[i] = first + i * blockDim.x;
      exists[i] = vectors[i] < task.num_vectors;
      if (!exists[i]) vectors[i] = 0;
    }
    task.locate(task.in_pieces ? 16 : task.vector_bytes, vectors, places);
  }
};

// The vectors of a tile that one thread moves.
struct TileVectors : ThreadVectors<kVectorsPerThread> {
  const VectorTask& task;

  __device__ __forceinline__ TileVectors(const VectorTask& of_task, uint32_t tile)
      : ThreadVectors(of_task, tile * kVectorsPerThread * blockDim.x + threadIdx.x),
        task(of_task) {}

  template <int kBytes, typename Op>
  __device__ __forceinline__ void move(const Op& op) const {
    using Vector = typename VectorOf<kBytes>::Type;
    Vector vectors[kVectorsPerThread];
#pragma unroll
    for (int i = 0; i < kVectorsPerThread; ++i)
      vectors[i] = load_vector<Vector>(task.src + places[i].src_bytes);
#pragma unroll
    for (int i = 0; i < kVectorsPerThread; ++i) {
      if (exists[i]) *reinterpret_cast<Vector*>(task.dst + places[i].dst_bytes) = op(vectors[i]);
    }
  }
};

// Passes the vectors of a tile to `move`, in one turn for each vector that 16 bytes hold.
template <typename Move>
__device__ __forceinline__ void move_turns(const VectorTask& task, uint32_t tile,
                                           const Move& move) {
  const uint32_t num_turns = 16 / task.vector_bytes;
#pragma unroll 1
  for (uint32_t turn = 0; turn < num_turns; ++turn)
    move(TileVectors(task, tile * num_turns + turn));
}

// The part of a run that shares 16 aligned bytes of the destination.
struct Piece {
  char* dst;        // aligned
  const char* src;  // of what goes to dst, which may lie outside of the run
  uint32_t shift;   // of src from an aligned address
  int begin, end;   // bytes of the piece that the run has
  bool is_inside;   // whole, as are the aligned vectors that hold its source

  __device__ __forceinline__ Piece(const VectorTask& task, const VectorPlace& place, bool exists) {
    const int gap = static_cast<int>(reinterpret_cast<uintptr_t>(task.dst + place.dst_bytes) % 16);
    const int64_t offset = int64_t{place.column} * 16 - gap;
    dst = task.dst + place.dst_bytes - gap;
    src = task.src + place.src_bytes - gap;
    shift = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(src) % 16);
    const int64_t rest = exists ? task.run_bytes - offset : 0;
    begin = offset < 0 ? static_cast<int>(-offset) : 0;
    end = rest < 16 ? static_cast<int>(rest) : 16;
    is_inside = offset >= shift && rest >= (shift == 0 ? 16 : 32 - static_cast<int>(shift));
  }

  __device__ __forceinline__ TwoVectors load() const {
    const auto* vectors = reinterpret_cast<const uint4*>(src - shift);
    return {vectors[0], shift == 0 ? uint4{} : vectors[1]};
  }

  template <int kUnitBytes, typename Op>
  __device__ __forceinline__ void move_units(const Op& op) const {
    using Unit = typename VectorOf<kUnitBytes>::Type;
    constexpr int kUnits = 16 / kUnitBytes;
    Unit units[kUnits] = {};
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      if (i * kUnitBytes >= begin && i * kUnitBytes < end)
        units[i] = load_vector<Unit>(src + i * kUnitBytes);
    }
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      if (i * kUnitBytes >= begin && i * kUnitBytes < end)
        reinterpret_cast<Unit*>(dst)[i] = op(units[i]);
    }
  }
};

// A tile in pieces. A whole piece takes two loads, so half as many are in flight.
template <typename Op>
__device__ __forceinline__ void move_pieces(const VectorTask& task, uint32_t tile, const Op& op) {
  constexpr int kTogether = kVectorsPerThread / 2;
  const uint32_t first = tile * kVectorsPerThread * blockDim.x + threadIdx.x;
  bool has_ends = false;
#pragma unroll 1
  for (int turn = 0; turn < kVectorsPerThread; turn += kTogether) {
    const ThreadVectors<kTogether> mine(task, first + turn * blockDim.x);
    TwoVectors sources[kTogether] = {};
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const Piece piece(task, mine.places[i], mine.exists[i]);
      if (piece.is_inside) sources[i] = piece.load();
    }
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const Piece piece(task, mine.places[i], mine.exists[i]);
      if (piece.is_inside) {
        *reinterpret_cast<uint4*>(piece.dst) = op(sources[i].from(piece.shift));
      } else {
        has_ends = true;
      }
    }
  }
  if (!has_ends) return;
#pragma unroll 1
  for (int turn = 0; turn < kVectorsPerThread; ++turn) {
    const ThreadVectors<1> mine(task, first + turn * blockDim.x);
    const Piece piece(task, mine.places[0], mine.exists[0]);
    if (!piece.is_inside) op(task, piece);
  }
}

}  // namespace pipecomm
