// A copy task as the CUDA kernels run it: an index space of vectors, cut into tiles. The arithmetic
// is the same on the host, where the tests run it.
//
//   vector v of a task:  run = v / run_vectors,  column = v % run_vectors
//   digits of its run:   (i_0, ..., i_n-1) in the mixed base count[0..n-1], the last one fastest
//   src address:         src + sum_d i_d * src_stride_bytes[d] + column * vector_bytes
//   dst address:         the same
//
// Vectors have 16, 8, 4, 2 or 1 bytes, as addresses, strides and run allow. Long runs that allow
// fewer than 16 move in pieces: column k is then the run's part of the k-th aligned 16 bytes of the
// destination that it touches, so that everything except its ends is stored in whole vectors.
//
// A task has fewer than 2^31 vectors (larger ones are cut into several), so divisions are in 32
// bits; offsets are in 64.
#pragma once

#include <cstdint>
#include <list>
#include <span>
#include <vector>

#include "copy/copy_buffers.h"
#include "copy/float_formats.h"
#include "plan/lower.h"

namespace pipecomm {

// Division by a number that is known before the kernel starts, for dividends below 2^31: a
// multiply, an add and a shift. With 2^s >= divisor > 2^(s-1) and
//   magic = floor(2^32 (2^s - divisor) / divisor) + 1
// it holds that
//   floor(n / divisor) = (floor(n * magic / 2^32) + n) >> s.
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

// Where a vector lies, and which one of its run it is.
struct VectorPlace {
  int64_t src_bytes;
  int64_t dst_bytes;
  uint32_t column;
};

struct VectorTask {
  const char* src = nullptr;
  char* dst = nullptr;
  int64_t run_bytes = 0;
  uint32_t num_vectors = 0;
  uint8_t vector_bytes = 16;  // a power of two that divides both addresses, all strides and the run
  bool in_pieces = false;     // of 16 bytes each, made of units of vector_bytes
  uint8_t num_dims = 0;
  Divisor run_vectors;
  Divisor count[kMaxCopyDims];
  int64_t src_stride_bytes[kMaxCopyDims] = {};
  int64_t dst_stride_bytes[kMaxCopyDims] = {};

  // The loop over dims is outside, so that kCount independent chains of divisions run side by side.
  template <int kCount>
  PIPECOMM_HOST_DEVICE void locate(int column_bytes, const uint32_t (&vectors)[kCount],
                                   VectorPlace (&places)[kCount]) const {
    uint32_t runs[kCount];
    for (int i = 0; i < kCount; ++i) {
      runs[i] = run_vectors.divide(vectors[i]);
      const uint32_t column = vectors[i] - runs[i] * run_vectors.value;
      places[i] = {int64_t{column} * column_bytes, int64_t{column} * column_bytes, column};
    }
#ifdef __CUDA_ARCH__
#pragma unroll 1
#endif
    for (int d = num_dims - 1; d >= 0; --d) {
      const Divisor divisor = count[d];
      const int64_t src_stride = src_stride_bytes[d], dst_stride = dst_stride_bytes[d];
      for (int i = 0; i < kCount; ++i) {
        const uint32_t next = divisor.divide(runs[i]);
        const int64_t index = runs[i] - next * divisor.value;
        places[i].src_bytes += index * src_stride;
        places[i].dst_bytes += index * dst_stride;
        runs[i] = next;
      }
    }
  }
};

inline constexpr int kVectorsPerThread = 4;  // independent loads in flight
inline constexpr int64_t kMinRunInPieces = 128;

// The largest of 16, 8, 4, 2, 1 bytes that addresses, strides and run are multiples of. Scaled tasks
// have 16 or those of an element.
int vector_bytes_of(const CopyTask& task, const void* src, const void* dst);

// The vector tasks of copy tasks, ordered by arithmetic and by the tensor of their boxes. Apart from
// their addresses they depend only on the alignment of the buffers, so most callers make them once.
class ResolvedTasks {
 public:
  // Tasks of more than `max_vectors` vectors become several.
  ResolvedTasks(std::span<const CopyTask> tasks, const CopyBuffers& buffers,
                int64_t max_vectors = (int64_t{1} << 31) - 1);

  // Whether they also fit these buffers.
  bool suits(const CopyBuffers& buffers) const { return alignment_ == alignment_of(buffers); }

  size_t size() const { return tasks_.size(); }
  int64_t num_vectors(size_t idx) const { return tasks_[idx].task.num_vectors; }
  // A tile has the bytes that `num_threads` threads move in kVectorsPerThread vectors of 16 bytes each.
  int64_t num_tiles(size_t idx, int num_threads) const;
  // Whether the runs of two tasks interleave, as those of boxes of one tensor do.
  bool lie_together(size_t a, size_t b) const;
  Arithmetic arithmetic(size_t idx) const { return tasks_[idx].from.arithmetic; }
  // Whether tasks [begin, end) have 16-byte vectors only.
  bool are_aligned(size_t begin, size_t end) const;
  VectorTask at(size_t idx, const CopyBuffers& buffers) const;

 private:
  struct Resolved {
    VectorTask task;  // without addresses
    CopyTask from;    // yields the addresses
  };

  static std::vector<uint8_t> alignment_of(const CopyBuffers& buffers);
  void append(const CopyTask& from, VectorTask task, int64_t max_vectors);

  std::vector<Resolved> tasks_;
  std::vector<uint8_t> alignment_;  // addresses of inputs, outputs and staging modulo 16
};

// Resolves repeated lists of tasks only once. For one thread at a time.
class RecentTasks {
 public:
  // Valid until the next call.
  const ResolvedTasks& resolve(std::span<const CopyTask> tasks, const CopyBuffers& buffers);

 private:
  struct Entry {
    std::vector<CopyTask> tasks;
    ResolvedTasks resolved;
  };
  std::list<Entry> entries_;  // the latest first
};

}  // namespace pipecomm
