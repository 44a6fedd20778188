// Bandwidth of the kernels on copies of exchanges, alternating with cudaMemcpyAsync of the same
// size.
#include <functional>

#include "parts.h"
#include "scaling.h"

namespace parts {

namespace {

constexpr int kRounds = 5;
constexpr double kMinUs = 2000;  // of a round
constexpr int64_t kMaxCheckedWhole = int64_t{4} << 20;

struct Case {
  std::string name;
  std::vector<CopyTask> tasks;
  Scale scale;
  DType dtype = dtypes::kUInt8;

  int64_t bytes() const {
    int64_t total = 0;
    for (const CopyTask& task : tasks) total += task.copy.bytes();
    return total;
  }
};

// num_rows runs, with these strides on the two sides.
CopyTask rows_task(int64_t src, int64_t dst, int64_t run, int64_t num_rows, int64_t src_stride,
                   int64_t dst_stride) {
  CopyTask task = run_task(src, dst, run);
  task.copy.num_dims = 1;
  task.copy.count[0] = num_rows;
  task.copy.src_stride_bytes[0] = src_stride;
  task.copy.dst_stride_bytes[0] = dst_stride;
  return task;
}

// A table of one run for each of 8 peers in every row, and 8 dense messages.
Case eight_peers(bool packs, int64_t bytes, int64_t run) {
  Case result{
      (packs ? "pack for 8, runs of " : "unpack of 8, runs of ") + std::to_string(run), {}, {}};
  const int64_t num_rows = bytes / (8 * run);
  for (int64_t peer = 0; peer < 8; ++peer) {
    const int64_t in_table = peer * run, message = peer * run * num_rows;
    result.tasks.push_back(packs ? rows_task(in_table, message, run, num_rows, 8 * run, run)
                                 : rows_task(message, in_table, run, num_rows, run, 8 * run));
  }
  return result;
}

Case scaled(const char* name, int64_t bytes, Arithmetic arithmetic, DType dtype,
            const Scale& scale) {
  Case result = eight_peers(true, bytes, 512);
  result.name = name;
  result.scale = scale;
  result.dtype = dtype;
  for (CopyTask& task : result.tasks) task.arithmetic = arithmetic;
  return result;
}

// Boxes of such weights side by side.
Case boxes(const char* name, int64_t bytes, const std::function<double(int)>& weight) {
  constexpr int kNumBoxes = 200;
  double sum = 0;
  for (int i = 0; i < kNumBoxes; ++i) sum += weight(i);
  Case result{name, {}, {}};
  int64_t offset = 0;
  for (int i = 0; i < kNumBoxes; ++i) {
    const auto length =
        std::max<int64_t>(static_cast<int64_t>(bytes * weight(i) / sum) / 16 * 16, 16);
    result.tasks.push_back(run_task(offset, offset, length));
    offset += length;
  }
  return result;
}

std::vector<Case> cases_of(int64_t bytes) {
  std::vector<Case> cases;
  const auto one_run = [&](const char* name, int64_t src, int64_t dst, int64_t length) {
    cases.push_back({name, {run_task(src, dst, length)}, {}});
  };
  one_run("contiguous", 0, 0, bytes);
  one_run("contiguous, odd length", 0, 0, bytes - 1);
  one_run("source at 1", 1, 0, bytes - 16);
  one_run("destination at 2", 0, 2, bytes - 16);
  one_run("both at 2", 2, 2, bytes - 16);
  one_run("source at 4, destination at 12", 4, 12, bytes - 16);
  for (const bool packs : {true, false})
    for (int64_t run = 16; run <= 64 << 10; run *= run < 1024 ? 2 : 4)
      cases.push_back(eight_peers(packs, bytes, run));
  for (const int64_t run : {1, 2, 3, 6, 10, 34, 66, 127, 130, 258, 1000}) {
    const int64_t num_rows = bytes / run;
    cases.push_back({"half of each row, " + std::to_string(run) + " B",
                     {rows_task(0, 0, run, num_rows, 2 * run, run)},
                     {}});
  }
  cases.push_back(scaled("bf16 / 8, runs of 512", bytes, Arithmetic::kBFloat16, dtypes::kBFloat16,
                         Scale::divide(8)));
  cases.push_back(scaled("bf16 / 6, runs of 512", bytes, Arithmetic::kBFloat16, dtypes::kBFloat16,
                         Scale::divide(6)));
  cases.push_back(scaled("fp16 * 6, runs of 512", bytes, Arithmetic::kFloat16, dtypes::kFloat16,
                         Scale::multiply(6)));
  cases.push_back(scaled("fp32 / 6, runs of 512", bytes, Arithmetic::kFloat32, dtypes::kFloat32,
                         Scale::divide(6)));
  cases.push_back(scaled("fp64 / 6, runs of 512", bytes, Arithmetic::kFloat64, dtypes::kFloat64,
                         Scale::divide(6)));
  cases.push_back(boxes("200 equal boxes", bytes, [](int) { return 1.0; }));
  cases.push_back(boxes("200 boxes, 1 to 1000", bytes, [](int i) { return std::exp(i * 0.0347); }));
  CopyTask transposed = rows_task(0, 0, 2, 1024, 2, bytes / 1024 / 2 * 2);
  transposed.copy.num_dims = 2;
  transposed.copy.count[1] = bytes / 1024 / 2;
  transposed.copy.src_stride_bytes[1] = 2048;
  transposed.copy.dst_stride_bytes[1] = 2;
  cases.push_back({"transposed, 2 B elements", {transposed}, {}});
  return cases;
}

// The source: numbers near one in every format, so that no scaling leaves the usual path.
uint8_t source_byte(int64_t position) {
  const uint64_t x = (static_cast<uint64_t>(position / 2) + 1) * 0x9e3779b97f4a7c15u;
  const auto word = static_cast<uint16_t>(0x3c00 | ((x ^ x >> 29) >> 22 & 0x3ff));
  return static_cast<uint8_t>(position % 2 == 0 ? word : word >> 8);
}

class Arena {
 public:
  explicit Arena(int64_t bytes) : source_(2 * bytes + 64), target_(bytes + 64) {
    constexpr int64_t kChunkBytes = int64_t{64} << 20;
    std::vector<uint8_t> chunk;
    for (int64_t begin = 0; begin < source_.size(); begin += kChunkBytes) {
      chunk.resize(std::min(kChunkBytes, source_.size() - begin));
      for (size_t i = 0; i < chunk.size(); ++i)
        chunk[i] = source_byte(begin + static_cast<int64_t>(i));
      source_.upload(chunk.data(), begin, std::ssize(chunk));
    }
  }

  CopyBuffers buffers() const {
    inputs_[0] = source_.data();
    outputs_[0] = target_.data();
    return {inputs_, outputs_, nullptr, nullptr};
  }
  void poison() { target_.fill(world::kPoison); }
  void copy(int64_t bytes, const device::Stream& stream) const {
    CUDA(cudaMemcpyAsync(target_.data(), source_.data(), bytes, cudaMemcpyDeviceToDevice, stream));
  }

  // The beginnings and ends of some runs of every task, or of all of them if there are few.
  void verify(const Case& tested) const {
    Random random(7);
    const int64_t num_samples = tested.bytes() <= kMaxCheckedWhole ? 200 : 2000;
    for (int64_t i = 0; i < num_samples; ++i) {
      const CopyTask& task = tested.tasks[random.between(0, std::ssize(tested.tasks) - 1)];
      int64_t src = task.src_offset_bytes, dst = task.dst_offset_bytes;
      for (int d = 0; d < task.copy.num_dims; ++d) {
        const int64_t last = task.copy.count[d] - 1;
        const int64_t index = random.chance(0.1) ? last : random.between(0, last);
        src += index * task.copy.src_stride_bytes[d];
        dst += index * task.copy.dst_stride_bytes[d];
      }
      const int64_t length = std::min<int64_t>(task.copy.run_bytes, 64);
      const int64_t rest = (task.copy.run_bytes - length) / 8 * 8;
      const int64_t skipped = random.chance(0.3) ? rest : random.between(0, rest / 8) * 8;
      verify_piece(tested, src + skipped, dst + skipped, length);
    }
    CHECK(target_.surroundings_are_intact());
  }

 private:
  void verify_piece(const Case& tested, int64_t src, int64_t dst, int64_t length) const {
    std::vector<uint8_t> expected(length), found(length);
    for (int64_t i = 0; i < length; ++i) expected[i] = source_byte(src + i);
    if (!tested.scale.is_none()) {
      for (int64_t i = 0; i < length; i += tested.dtype.itemsize)
        scaling::scale_element(expected.data() + i, tested.dtype, tested.scale);
    }
    target_.download(found.data(), dst, length);
    CHECK(found == expected);
  }

  device::Memory source_, target_;
  mutable const void* inputs_[1];
  mutable void* outputs_[1];
};

// Medians of rounds in which the kernel and a copy of as many bytes take turns.
void measure(const Case& tested, const Arena& arena, const device::Stream& stream,
             const device::Timer& timer, Figures& figures) {
  const CopyBuffers buffers = arena.buffers();
  const ResolvedTasks tasks(tested.tasks, buffers);
  const int64_t bytes = tested.bytes();
  const auto launch = [&] { CUDA(execute_cuda(tasks, buffers, tested.scale, {stream, 0})); };
  const auto copy = [&] { arena.copy(bytes, stream); };
  const double once_us = timer.us(stream, launch);
  const int repeats = static_cast<int>(std::clamp(kMinUs / std::max(once_us, 1.0), 1.0, 100.0));
  const auto us_of = [&](const auto& enqueue) {
    return timer.us(stream, [&] {
      for (int i = 0; i < repeats; ++i) enqueue();
    }) / repeats;
  };
  std::vector<double> kernel_us, copy_us, fractions;
  for (int round = 0; round <= (figures.is_of_host() ? 1 : kRounds); ++round) {
    const double theirs = us_of(copy), ours = us_of(launch);
    if (round == 0) continue;  // a warm-up
    kernel_us.push_back(ours);
    copy_us.push_back(theirs);
    fractions.push_back(theirs / ours);
  }
  const double us = device::median(kernel_us);
  figures.rows.push_back({tested.name,
                          {{"us", us},
                           {"memcpy_us", device::median(copy_us)},
                           {"gb_per_s", 2e-3 * static_cast<double>(bytes) / us},
                           {"of_memcpy", device::median(fractions)}}});
}

}  // namespace

Figures bandwidth(int64_t mib) {
  const int64_t bytes = mib << 20;
  const device::Stream stream;
  const device::Timer timer;
  Arena arena(bytes);
  Figures figures;
  for (const Case& tested : cases_of(bytes)) {
    check::context = tested.name + ", " + std::to_string(mib) + " MiB";
    arena.poison();
    const CopyBuffers buffers = arena.buffers();
    execute(tested.tasks, buffers, tested.scale, {stream, 0});
    stream.synchronize();
    arena.verify(tested);
    measure(tested, arena, stream, timer, figures);
  }
  return figures;
}

}  // namespace parts
