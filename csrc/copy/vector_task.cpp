#include "copy/vector_task.h"

#include <algorithm>
#include <bit>
#include <utility>

namespace pipecomm {

namespace {

constexpr int kVectorBytes = 16;  // the widest load and store

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

// The vectors of a run. A run in pieces has up to 15 bytes before and after whole ones.
int64_t run_vectors_of(const VectorTask& task, int64_t run_bytes) {
  return task.in_pieces ? (run_bytes + 2 * (kVectorBytes - 1)) / kVectorBytes
                        : run_bytes / task.vector_bytes;
}

// The tensor of a task's box: the input, or the output if the source is staging.
std::pair<bool, int> tensor_of(const CopyTask& task) {
  const bool is_input = task.src_tensor_idx >= 0;
  return {is_input, is_input ? task.src_tensor_idx : task.dst_tensor_idx};
}

// Halves the copy along its outermost loop, or else along its run.
std::pair<CopyTask, CopyTask> halves(const CopyTask& whole, int64_t granule) {
  CopyTask first = whole, second = whole;
  const StridedCopy& copy = whole.copy;
  const auto outermost =
      std::find_if(copy.count, copy.count + copy.num_dims, [](int64_t count) { return count > 1; });
  const auto d = outermost - copy.count;
  if (d < copy.num_dims) {
    first.copy.count[d] = copy.count[d] / 2;
    second.copy.count[d] -= first.copy.count[d];
    second.src_offset_bytes += first.copy.count[d] * copy.src_stride_bytes[d];
    second.dst_offset_bytes += first.copy.count[d] * copy.dst_stride_bytes[d];
  } else {
    first.copy.run_bytes = copy.run_bytes / granule / 2 * granule;
    second.copy.run_bytes -= first.copy.run_bytes;
    second.src_offset_bytes += first.copy.run_bytes;
    second.dst_offset_bytes += first.copy.run_bytes;
  }
  return {first, second};
}

bool is_same(const CopyTask& a, const CopyTask& b) {
  return a.src_tensor_idx == b.src_tensor_idx && a.dst_tensor_idx == b.dst_tensor_idx &&
         a.src_offset_bytes == b.src_offset_bytes && a.dst_offset_bytes == b.dst_offset_bytes &&
         a.arithmetic == b.arithmetic && a.copy.run_bytes == b.copy.run_bytes &&
         a.copy.num_dims == b.copy.num_dims && std::ranges::equal(a.copy.count, b.copy.count) &&
         std::ranges::equal(a.copy.src_stride_bytes, b.copy.src_stride_bytes) &&
         std::ranges::equal(a.copy.dst_stride_bytes, b.copy.dst_stride_bytes);
}

}  // namespace

Divisor::Divisor(uint32_t divisor) : value(divisor) {
  shift = static_cast<uint32_t>(std::bit_width(divisor - 1));
  magic = static_cast<uint32_t>((((uint64_t{1} << shift) - divisor) << 32) / divisor + 1);
}

int vector_bytes_of(const CopyTask& task, const void* src, const void* dst) {
  uint64_t address_bits = reinterpret_cast<uintptr_t>(src) | reinterpret_cast<uintptr_t>(dst) |
                          static_cast<uint64_t>(task.copy.run_bytes) | kVectorBytes;
  for (int d = 0; d < task.copy.num_dims; ++d) {
    if (task.copy.count[d] == 1) continue;
    address_bits |= static_cast<uint64_t>(task.copy.src_stride_bytes[d]) |
                    static_cast<uint64_t>(task.copy.dst_stride_bytes[d]);
  }
  const int vector_bytes = 1 << std::countr_zero(address_bits);
  if (task.arithmetic == Arithmetic::kBytes || vector_bytes == kVectorBytes) return vector_bytes;
  return element_bytes(task.arithmetic);
}

ResolvedTasks::ResolvedTasks(std::span<const CopyTask> tasks, const CopyBuffers& buffers,
                             int64_t max_vectors)
    : alignment_(alignment_of(buffers)) {
  tasks_.reserve(tasks.size());
  for (const CopyTask& from : tasks) {
    VectorTask task;
    task.vector_bytes = static_cast<uint8_t>(
        vector_bytes_of(from, source_of(from, buffers), destination_of(from, buffers)));
    task.in_pieces = task.vector_bytes < kVectorBytes && from.copy.run_bytes >= kMinRunInPieces;
    append(from, task, max_vectors);
  }
  std::stable_sort(tasks_.begin(), tasks_.end(), [](const Resolved& a, const Resolved& b) {
    return std::pair(a.from.arithmetic, tensor_of(a.from)) <
           std::pair(b.from.arithmetic, tensor_of(b.from));
  });
}

int64_t ResolvedTasks::num_tiles(size_t idx, int num_threads) const {
  const VectorTask& task = tasks_[idx].task;
  const int turns = task.in_pieces ? 1 : kVectorBytes / task.vector_bytes;
  const int64_t tile_vectors = int64_t{kVectorsPerThread} * num_threads * turns;
  return (task.num_vectors + tile_vectors - 1) / tile_vectors;
}

bool ResolvedTasks::lie_together(size_t a, size_t b) const {
  const auto is_strided = [](const CopyTask& task) { return task.copy.num_runs() > 1; };
  const CopyTask &first = tasks_[a].from, &second = tasks_[b].from;
  return is_strided(first) && is_strided(second) && tensor_of(first) == tensor_of(second);
}

void ResolvedTasks::append(const CopyTask& from, VectorTask task, int64_t max_vectors) {
  const StridedCopy& copy = from.copy;
  if (copy.bytes() == 0) return;
  const int64_t run_vectors = run_vectors_of(task, copy.run_bytes);
  if (copy.num_runs() * run_vectors > max_vectors) {
    const auto [first, second] = halves(from, task.vector_bytes);
    append(first, task, max_vectors);
    append(second, task, max_vectors);
    return;
  }
  task.run_bytes = copy.run_bytes;
  task.num_vectors = static_cast<uint32_t>(copy.num_runs() * run_vectors);
  task.num_dims = static_cast<uint8_t>(copy.num_dims);
  task.run_vectors = Divisor(static_cast<uint32_t>(run_vectors));
  for (int d = 0; d < copy.num_dims; ++d) {
    task.count[d] = Divisor(static_cast<uint32_t>(copy.count[d]));
    task.src_stride_bytes[d] = copy.src_stride_bytes[d];
    task.dst_stride_bytes[d] = copy.dst_stride_bytes[d];
  }
  tasks_.push_back({task, from});
}

std::vector<uint8_t> ResolvedTasks::alignment_of(const CopyBuffers& buffers) {
  std::vector<uint8_t> alignment;
  alignment.reserve(buffers.inputs.size() + buffers.outputs.size() + 2);
  const auto add = [&](const void* address) {
    alignment.push_back(reinterpret_cast<uintptr_t>(address) % kVectorBytes);
  };
  for (const void* input : buffers.inputs) add(input);
  for (const void* output : buffers.outputs) add(output);
  add(buffers.send_staging);
  add(buffers.recv_staging);
  return alignment;
}

bool ResolvedTasks::are_aligned(size_t begin, size_t end) const {
  return std::all_of(tasks_.begin() + begin, tasks_.begin() + end, [](const Resolved& resolved) {
    return resolved.task.vector_bytes == kVectorBytes;
  });
}

VectorTask ResolvedTasks::at(size_t idx, const CopyBuffers& buffers) const {
  VectorTask task = tasks_[idx].task;
  task.src = source_of(tasks_[idx].from, buffers);
  task.dst = destination_of(tasks_[idx].from, buffers);
  return task;
}

const ResolvedTasks& RecentTasks::resolve(std::span<const CopyTask> tasks,
                                          const CopyBuffers& buffers) {
  constexpr size_t kMaxEntries = 32;
  const auto known = std::find_if(entries_.begin(), entries_.end(), [&](const Entry& entry) {
    return std::ranges::equal(entry.tasks, tasks, is_same) && entry.resolved.suits(buffers);
  });
  if (known != entries_.end()) {
    entries_.splice(entries_.begin(), entries_, known);
  } else {
    entries_.push_front({{tasks.begin(), tasks.end()}, ResolvedTasks(tasks, buffers)});
    if (entries_.size() > kMaxEntries) entries_.pop_back();
  }
  return entries_.front().resolved;
}

}  // namespace pipecomm
