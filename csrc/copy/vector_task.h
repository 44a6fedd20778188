// A copy task as the CUDA kernel runs it: an index space of 16-, 8-, 4-, 2- or 1-byte vectors, cut
// in tiles. The arithmetic is the same on the host, where the tests run it.
//
//   vector v of a task:  run = v / run_vectors,  column = v % run_vectors,
//                        (i_0, ..., i_n-1) = run in the mixed base count[0..n-1], last digit
//                        fastest
//   src address:         src + sum_d i_d * src_stride_bytes[d] + column * vector_bytes, dst
//   likewise
//
// A task has fewer than 2^31 vectors (larger ones are cut in several), so divisions are in 32 bits;
// offsets are in 64.
#pragma once

#include <cstdint>
#include <vector>

#include "copy/copy_buffers.h"
#include "copy/float_formats.h"
#include "plan/lower.h"

namespace pipecomm {

// Division by a number that is known before the kernel starts, for dividends below 2^31: a
// multiply, an add and a shift. With 2^s >= divisor > 2^(s-1), magic = floor(2^32 (2^s - divisor) /
// divisor) + 1 gives floor(n / divisor) = (floor(n * magic / 2^32) + n) >> s.
struct Divisor {
  uint32_t value = 1;
  uint32_t magic = 1;
  uint32_t shift = 0;

  Divisor() = default;
  explicit Divisor(uint32_t divisor);

  PIPECOMM_HOST_DEVICE uint32_t divide(uint32_t n) const {
    const auto high = static_cast<uint32_t>((uint64_t{n} * magic) >> 32);
    return (high + n) >> shift;
  }
};

struct VectorOffsets {
  int64_t src_bytes;
  int64_t dst_bytes;
};

struct VectorTask {
  const char* src = nullptr;
  char* dst = nullptr;
  uint32_t num_vectors = 0;
  uint32_t first_tile = 0;    // tiles of the launch before this task
  uint8_t vector_bytes = 16;  // a power of two that divides both addresses, all strides and the run
  Arithmetic arithmetic = Arithmetic::kBytes;
  int32_t num_dims = 0;
  Divisor run_vectors;
  Divisor count[kMaxCopyDims];
  int64_t src_stride_bytes[kMaxCopyDims] = {};
  int64_t dst_stride_bytes[kMaxCopyDims] = {};

  PIPECOMM_HOST_DEVICE VectorOffsets offsets_of(uint32_t vector) const {
    uint32_t run = run_vectors.divide(vector);
    const int64_t column_bytes = int64_t{vector - run * run_vectors.value} * vector_bytes;
    VectorOffsets offsets{column_bytes, column_bytes};
    for (int d = num_dims - 1; d >= 0; --d) {
      const uint32_t next = count[d].divide(run);
      const int64_t index = run - next * count[d].value;
      offsets.src_bytes += index * src_stride_bytes[d];
      offsets.dst_bytes += index * dst_stride_bytes[d];
      run = next;
    }
    return offsets;
  }
};

inline constexpr int kTileThreads = 256;
inline constexpr int kTileVectorsPerThread = 4;  // independent loads in flight
inline constexpr int kTileVectors = kTileThreads * kTileVectorsPerThread;

// The largest of 16, 8, 4, 2, 1 bytes in which the whole task can be copied. Scaled tasks move
// 16-byte vectors or single elements.
int vector_bytes_of(const CopyTask& task, const void* src, const void* dst);

// Resolves tasks to addresses. Tasks of more than `max_vectors` vectors become several.
std::vector<VectorTask> vector_tasks(std::span<const CopyTask> tasks, const CopyBuffers& buffers,
                                     int64_t max_vectors = (int64_t{1} << 31) - 1);

// Numbers the tiles of tasks that are launched together; returns how many there are.
int64_t number_tiles(std::span<VectorTask> tasks);

}  // namespace pipecomm
