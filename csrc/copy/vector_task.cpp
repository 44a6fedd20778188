#include "copy/vector_task.h"

#include <algorithm>
#include <bit>

namespace pipecomm {

namespace {

int element_bytes(Arithmetic arithmetic) {
  switch (arithmetic) {
    case Arithmetic::kFloat16:
    case Arithmetic::kBFloat16:
      return 2;
    case Arithmetic::kFloat32:
      return 4;
    case Arithmetic::kFloat64:
      return 8;
    case Arithmetic::kBytes:
      break;
  }
  return 1;
}

// Appends the copy, halved along its outermost loop, or else along its run, until it fits.
void append(const StridedCopy& copy, VectorTask task, int64_t max_vectors,
            std::vector<VectorTask>& result) {
  const int64_t num_vectors = copy.bytes() / task.vector_bytes;
  if (num_vectors == 0) return;
  if (num_vectors > max_vectors) {
    StridedCopy first = copy, second = copy;
    VectorTask second_task = task;
    const auto outermost = std::find_if(copy.count, copy.count + copy.num_dims,
                                        [](int64_t count) { return count > 1; });
    if (outermost != copy.count + copy.num_dims) {
      const auto d = outermost - copy.count;
      first.count[d] = copy.count[d] / 2;
      second.count[d] -= first.count[d];
      second_task.src += first.count[d] * copy.src_stride_bytes[d];
      second_task.dst += first.count[d] * copy.dst_stride_bytes[d];
    } else {
      first.run_bytes = copy.run_bytes / task.vector_bytes / 2 * task.vector_bytes;
      second.run_bytes -= first.run_bytes;
      second_task.src += first.run_bytes;
      second_task.dst += first.run_bytes;
    }
    append(first, task, max_vectors, result);
    append(second, second_task, max_vectors, result);
    return;
  }
  task.num_vectors = static_cast<uint32_t>(num_vectors);
  task.num_dims = copy.num_dims;
  task.run_vectors = Divisor(static_cast<uint32_t>(copy.run_bytes / task.vector_bytes));
  for (int d = 0; d < copy.num_dims; ++d) {
    task.count[d] = Divisor(static_cast<uint32_t>(copy.count[d]));
    task.src_stride_bytes[d] = copy.src_stride_bytes[d];
    task.dst_stride_bytes[d] = copy.dst_stride_bytes[d];
  }
  result.push_back(task);
}

}  // namespace

Divisor::Divisor(uint32_t divisor) : value(divisor) {
  shift = static_cast<uint32_t>(std::bit_width(divisor - 1));
  magic = static_cast<uint32_t>((((uint64_t{1} << shift) - divisor) << 32) / divisor + 1);
}

int vector_bytes_of(const CopyTask& task, const void* src, const void* dst) {
  uint64_t address_bits = reinterpret_cast<uintptr_t>(src) | reinterpret_cast<uintptr_t>(dst) |
                          static_cast<uint64_t>(task.copy.run_bytes) | 16;
  for (int d = 0; d < task.copy.num_dims; ++d) {
    if (task.copy.count[d] == 1) continue;
    address_bits |= static_cast<uint64_t>(task.copy.src_stride_bytes[d]) |
                    static_cast<uint64_t>(task.copy.dst_stride_bytes[d]);
  }
  const int vector_bytes = 1 << std::countr_zero(address_bits);
  if (task.arithmetic == Arithmetic::kBytes || vector_bytes == 16) return vector_bytes;
  return element_bytes(task.arithmetic);
}

std::vector<VectorTask> vector_tasks(std::span<const CopyTask> tasks, const CopyBuffers& buffers,
                                     int64_t max_vectors) {
  std::vector<VectorTask> result;
  result.reserve(tasks.size());
  for (const CopyTask& task : tasks) {
    VectorTask resolved;
    resolved.src = source_of(task, buffers);
    resolved.dst = destination_of(task, buffers);
    resolved.arithmetic = task.arithmetic;
    resolved.vector_bytes = static_cast<uint8_t>(vector_bytes_of(task, resolved.src, resolved.dst));
    append(task.copy, resolved, max_vectors, result);
  }
  return result;
}

int64_t number_tiles(std::span<VectorTask> tasks) {
  int64_t num_tiles = 0;
  for (VectorTask& task : tasks) {
    task.first_tile = static_cast<uint32_t>(num_tiles);
    num_tiles += (int64_t{task.num_vectors} + kTileVectors - 1) / kTileVectors;
  }
  return num_tiles;
}

}  // namespace pipecomm
