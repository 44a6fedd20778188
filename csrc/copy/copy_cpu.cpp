// A job is cut into slabs: the same fraction of every task. Slab after slab, all tasks read (or
// write) the same rows of the tensor, so each row passes through the caches once, even if many
// peers share it.
#include "copy/copy_cpu.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "copy/float_formats.h"

namespace pipecomm {

namespace {

constexpr int64_t kCacheLineBytes = 64;
constexpr int64_t kSlabBytes = 256 << 10;       // of all tasks together; well inside the L2 cache
constexpr int64_t kMinTaskSlabBytes = 4 << 10;  // below, starting a task costs more than it saves
constexpr int64_t kMinThreadBytes = 1 << 20;    // below, waking a thread costs more than it saves

// ---- copying one run ----

// The hardware predicts neither the jump to the next run nor that its lines will be written, so
// they are prefetched: about 25 % faster for runs of 256 B to 16 KiB. Streaming stores
// were slower than this at 4, 25 and 100 MB (measured on a Xeon with AVX-512, one thread).
inline void prefetch_for_writing(const char* dst, int64_t ahead_bytes, int64_t bytes) {
  const uintptr_t ahead = reinterpret_cast<uintptr_t>(dst) + ahead_bytes;
  for (int64_t line = 0; line < bytes; line += kCacheLineBytes) {
    __builtin_prefetch(reinterpret_cast<const void*>(ahead + line), 1);
  }
}

// Prefetches the run that lies about 1 KiB ahead.
struct CopyRun {
  int64_t dst_ahead_bytes;

  explicit CopyRun(const StridedCopy& copy) {
    constexpr int64_t kAheadBytes = 1024;
    const int64_t runs_ahead = std::clamp<int64_t>(kAheadBytes / copy.run_bytes, 1, 8);
    dst_ahead_bytes = runs_ahead * copy.dst_stride_bytes[copy.num_dims - 1];
  }

  void operator()(char* dst, const char* src, int64_t bytes) const {
    prefetch_for_writing(dst, dst_ahead_bytes, bytes);
    std::memcpy(dst, src, bytes);
  }
};

// Runs that are worth prefetching piece by piece. This is a type of its own because the compiler
// would copy short pieces with its string instruction, which is slow to start.
constexpr int64_t kLongRunBytes = 16 << 10;
struct CopyLongRun {
  void operator()(char* dst, const char* src, int64_t bytes) const {
    constexpr int64_t kPieceBytes = 4 << 10;
    for (; bytes > kPieceBytes; bytes -= kPieceBytes, dst += kPieceBytes, src += kPieceBytes) {
      prefetch_for_writing(dst, kPieceBytes, std::min(kPieceBytes, bytes - kPieceBytes));
      std::memcpy(dst, src, kPieceBytes);
    }
    std::memcpy(dst, src, bytes);
  }
};

// Runs of one machine word, as permuted tensors have them.
template <int kRunBytes>
struct CopyWord {
  void operator()(char* dst, const char* src, int64_t bytes) const {
    if (bytes == kRunBytes) {
      std::memcpy(dst, src, kRunBytes);
    } else {
      std::memcpy(dst, src, bytes);
    }
  }
};

template <typename Format, Scale::Kind kKind>
struct ScaleElements {
  typename Format::Compute factor;

  void operator()(char* dst, const char* src, int64_t bytes) const {
    using Storage = typename Format::Storage;
    const int64_t count = bytes / static_cast<int64_t>(sizeof(Storage));
    for (int64_t i = 0; i < count; ++i) {
      Storage element;
      std::memcpy(&element, src + i * sizeof(Storage), sizeof(Storage));
      const auto value = Format::load(element);
      element = Format::store(kKind == Scale::Kind::kMultiply ? value * factor : value / factor);
      std::memcpy(dst + i * sizeof(Storage), &element, sizeof(Storage));
    }
  }
};

// ---- walking the runs of one task ----

// Applies `op` to bytes [begin, end) of the copy, counted in the order of its runs.
template <typename RunOp>
void walk(const StridedCopy& copy, char* dst, const char* src, int64_t begin, int64_t end,
          const RunOp& op) {
  const int64_t run_bytes = copy.run_bytes;
  const int last = copy.num_dims - 1;
  int64_t index[kMaxCopyDims] = {};
  int64_t within_run = begin % run_bytes;
  int64_t run = begin / run_bytes;
  for (int d = last; d >= 0; --d) {
    index[d] = run % copy.count[d];
    run /= copy.count[d];
    src += index[d] * copy.src_stride_bytes[d];
    dst += index[d] * copy.dst_stride_bytes[d];
  }
  int64_t remaining = end - begin;
  while (remaining > 0) {
    // To the end of the innermost loop, in whole runs except the first and the last.
    int64_t num_runs = last < 0 ? 1 : copy.count[last] - index[last];
    const int64_t src_stride = last < 0 ? 0 : copy.src_stride_bytes[last];
    const int64_t dst_stride = last < 0 ? 0 : copy.dst_stride_bytes[last];
    if (within_run > 0) {
      const int64_t bytes = std::min(run_bytes - within_run, remaining);
      op(dst + within_run, src + within_run, bytes);
      remaining -= bytes;
      within_run = 0;
      --num_runs;
      src += src_stride;
      dst += dst_stride;
    }
    const int64_t num_whole = std::min(num_runs, remaining / run_bytes);
    for (int64_t i = 0; i < num_whole; ++i) {
      op(dst, src, run_bytes);
      src += src_stride;
      dst += dst_stride;
    }
    remaining -= num_whole * run_bytes;
    if (num_whole < num_runs) {
      if (remaining > 0) op(dst, src, remaining);
      return;
    }
    // The innermost loop is complete: back to its start and one step in the next outer one.
    int d = last;
    while (d >= 0) {
      src -= copy.count[d] * copy.src_stride_bytes[d];
      dst -= copy.count[d] * copy.dst_stride_bytes[d];
      index[d] = 0;
      if (--d < 0) return;
      src += copy.src_stride_bytes[d];
      dst += copy.dst_stride_bytes[d];
      if (++index[d] < copy.count[d]) break;
    }
    if (d < 0) return;
  }
}

template <typename Format>
void walk_scaled(const StridedCopy& copy, char* dst, const char* src, int64_t begin, int64_t end,
                 const Scale& scale) {
  const auto factor = static_cast<typename Format::Compute>(scale.factor);
  if (scale.kind == Scale::Kind::kMultiply) {
    walk(copy, dst, src, begin, end, ScaleElements<Format, Scale::Kind::kMultiply>{factor});
  } else {
    walk(copy, dst, src, begin, end, ScaleElements<Format, Scale::Kind::kDivide>{factor});
  }
}

void copy_range(const CopyTask& task, char* dst, const char* src, int64_t begin, int64_t end,
                const Scale& scale) {
  const StridedCopy& copy = task.copy;
  if (begin >= end) return;
  switch (task.arithmetic) {
    case Arithmetic::kFloat16:
      return walk_scaled<Float16>(copy, dst, src, begin, end, scale);
    case Arithmetic::kBFloat16:
      return walk_scaled<BFloat16>(copy, dst, src, begin, end, scale);
    case Arithmetic::kFloat32:
      return walk_scaled<Float32>(copy, dst, src, begin, end, scale);
    case Arithmetic::kFloat64:
      return walk_scaled<Float64>(copy, dst, src, begin, end, scale);
    case Arithmetic::kBytes:
      break;
  }
  if (copy.num_dims == 0 || copy.run_bytes >= kLongRunBytes) {
    return walk(copy, dst, src, begin, end, CopyLongRun{});
  }
  switch (copy.run_bytes) {
    case 1:
      return walk(copy, dst, src, begin, end, CopyWord<1>{});
    case 2:
      return walk(copy, dst, src, begin, end, CopyWord<2>{});
    case 4:
      return walk(copy, dst, src, begin, end, CopyWord<4>{});
    case 8:
      return walk(copy, dst, src, begin, end, CopyWord<8>{});
    case 16:
      return walk(copy, dst, src, begin, end, CopyWord<16>{});
    default:
      return walk(copy, dst, src, begin, end, CopyRun(copy));
  }
}

// ---- the whole job ----

// Where slab `slab` of `num_slabs` of a task begins: between two runs or, in long runs, two lines.
int64_t slab_begin(const StridedCopy& copy, int64_t slab, int64_t num_slabs) {
  const int64_t bytes = copy.bytes();
  if (slab == num_slabs) return bytes;
  const int64_t position = bytes / num_slabs * slab + bytes % num_slabs * slab / num_slabs;
  const int64_t unit = copy.run_bytes <= kMinTaskSlabBytes ? copy.run_bytes : kCacheLineBytes;
  return position / unit * unit;
}

// ---- part of a message ----

void check_range(const LoweredMessage& message, int64_t begin, int64_t end) {
  if (begin < 0 || begin > end || end > message.bytes) {
    throw std::invalid_argument("bytes [" + std::to_string(begin) + ", " + std::to_string(end) +
                                ") lie outside a message of " + std::to_string(message.bytes) +
                                " bytes");
  }
}

// A number cut in two cannot be scaled. In a message every number begins at a multiple of its size.
void check_between_elements(const LoweredMessage& message, int64_t begin, int64_t end) {
  constexpr int64_t kLargestNumberBytes = 8;
  if (begin % kLargestNumberBytes != 0 ||
      (end % kLargestNumberBytes != 0 && end != message.bytes)) {
    throw std::invalid_argument("a scaled message must be cut at multiples of 8 bytes, got [" +
                                std::to_string(begin) + ", " + std::to_string(end) + ")");
  }
}

// Calls use(task, task_begin, task_end, chunk_offset) for every task of a staged message that holds
// some of its bytes [begin, end). `position` gives a task's offset in the staging buffer.
template <typename Position, typename Use>
void for_tasks_in_range(std::span<const CopyTask> tasks, const LoweredMessage& message,
                        int64_t begin, int64_t end, const Position& position, const Use& use) {
  const auto message_tasks =
      tasks.subspan(message.task_begin, message.task_end - message.task_begin);
  auto task = std::partition_point(
      message_tasks.begin(), message_tasks.end(), [&](const CopyTask& candidate) {
        return position(candidate) - message.offset_bytes + candidate.copy.bytes() <= begin;
      });
  for (; task != message_tasks.end(); ++task) {
    const int64_t task_offset = position(*task) - message.offset_bytes;
    if (task_offset >= end) return;
    const int64_t task_begin = std::max<int64_t>(begin - task_offset, 0);
    const int64_t task_end = std::min(end - task_offset, task->copy.bytes());
    use(*task, task_begin, task_end, task_offset - begin);
  }
}

}  // namespace

void execute_cpu(std::span<const CopyTask> tasks, const CopyBuffers& buffers, const Scale& scale,
                 ThreadPool* pool) {
  int64_t total_bytes = 0;
  for (const CopyTask& task : tasks) total_bytes += task.copy.bytes();
  if (total_bytes == 0) return;

  const int64_t max_parts = pool ? pool->num_threads() : 1;
  const int64_t num_parts = std::clamp<int64_t>(total_bytes / kMinThreadBytes, 1, max_parts);
  const int64_t slab_bytes =
      std::max<int64_t>(kSlabBytes, kMinTaskSlabBytes * static_cast<int64_t>(tasks.size()));
  const int64_t slabs_per_part = std::max<int64_t>(total_bytes / slab_bytes / num_parts, 1);
  const int64_t num_slabs = slabs_per_part * num_parts;

  const auto run_part = [&](int part) {
    for (int64_t slab = part * slabs_per_part; slab < (part + 1) * slabs_per_part; ++slab) {
      for (const CopyTask& task : tasks) {
        copy_range(task, destination_of(task, buffers), source_of(task, buffers),
                   slab_begin(task.copy, slab, num_slabs),
                   slab_begin(task.copy, slab + 1, num_slabs), scale);
      }
    }
  };
  if (num_parts == 1) {
    run_part(0);
  } else {
    pool->parallel_for(static_cast<int>(num_parts), run_part);
  }
}

void pack_range(const LoweredExchange& exchange, const LoweredMessage& send,
                const CopyBuffers& buffers, int64_t begin, int64_t end, void* chunk) {
  check_range(send, begin, end);
  if (!exchange.scale.is_none()) check_between_elements(send, begin, end);
  if (begin == end) return;
  char* const dst = static_cast<char*>(chunk);
  if (!send.is_staged()) {
    const char* src = static_cast<const char*>(buffers.inputs[send.tensor_idx]);
    std::memcpy(dst, src + send.offset_bytes + begin, end - begin);
    return;
  }
  for_tasks_in_range(
      exchange.pack(), send, begin, end, [](const CopyTask& task) { return task.dst_offset_bytes; },
      [&](const CopyTask& task, int64_t task_begin, int64_t task_end, int64_t chunk_offset) {
        copy_range(task, dst + chunk_offset, source_of(task, buffers), task_begin, task_end,
                   exchange.scale);
      });
}

void unpack_range(const LoweredExchange& exchange, const LoweredMessage& recv,
                  const CopyBuffers& buffers, int64_t begin, int64_t end, const void* chunk) {
  check_range(recv, begin, end);
  if (begin == end) return;
  const char* const src = static_cast<const char*>(chunk);
  if (!recv.is_staged()) {
    char* dst = static_cast<char*>(buffers.outputs[recv.tensor_idx]);
    std::memcpy(dst + recv.offset_bytes + begin, src, end - begin);
    return;
  }
  for_tasks_in_range(
      exchange.unpack(), recv, begin, end,
      [](const CopyTask& task) { return task.src_offset_bytes; },
      [&](const CopyTask& task, int64_t task_begin, int64_t task_end, int64_t chunk_offset) {
        copy_range(task, destination_of(task, buffers), src + chunk_offset, task_begin, task_end,
                   exchange.scale);
      });
}

}  // namespace pipecomm
