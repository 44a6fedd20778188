// The CUDA executor, compiled for the host by shim/cuda_runtime.h: arithmetic, tasks and launches.
// kernels/ tests it on exchanges.

#include "copy/copy_cuda.cu"
#include "copy/mean_cuda.cu"
#include "world.h"

using world::Random;

cudaError_t run(std::span<const CopyTask> tasks, const CopyBuffers& buffers,
                const Scale& scale = {}, const CudaLaunch& launch = {}) {
  return execute_cuda(ResolvedTasks(tasks, buffers), buffers, scale, launch);
}

TEST(divisor) {
  Random random(1);
  const int64_t largest = std::numeric_limits<int32_t>::max();
  for (int i = 0; i < 20000; ++i) {
    const int64_t bound = int64_t{1} << random.between(0, 31);
    const auto divisor = uint32_t(random.between(1, std::min(bound, largest)));
    const Divisor by(divisor);
    for (int64_t n : {int64_t{0}, random.between(0, largest), largest, largest / divisor * divisor,
                      largest / divisor * divisor - 1}) {
      CHECK_EQ(by.divide(uint32_t(n)), n / divisor);
    }
  }
}

// One launch for each 196 tasks; all tasks run once.
TEST(number_of_launches) {
  std::vector<uint8_t> from(500 * 3), to(500 * 3, 0);
  for (size_t i = 0; i < from.size(); ++i) from[i] = uint8_t(i * 31 + 7);
  const void* const inputs[] = {from.data()};
  void* const outputs[] = {to.data()};
  for (const auto& [num_tasks, num_launches] :
       {std::pair{0, 0}, {1, 1}, {4, 1}, {5, 1}, {24, 1}, {25, 1}, {196, 1}, {197, 2}, {500, 3}}) {
    std::vector<CopyTask> tasks(num_tasks);
    for (int i = 0; i < num_tasks; ++i) {
      tasks[i].src_tensor_idx = tasks[i].dst_tensor_idx = 0;
      tasks[i].src_offset_bytes = tasks[i].dst_offset_bytes = i * 3;
      tasks[i].copy.run_bytes = 3;
    }
    std::fill(to.begin(), to.end(), 0);
    shim::num_launches = 0;
    CHECK_EQ(run(tasks, {inputs, outputs, nullptr, nullptr}), cudaSuccess);
    CHECK_EQ(shim::num_launches, num_launches);
    CHECK(std::equal(to.begin(), to.begin() + num_tasks * 3, from.begin()));
    CHECK(
        std::all_of(to.begin() + num_tasks * 3, to.end(), [](uint8_t byte) { return byte == 0; }));

    shim::num_launches = 0;
    shim::fail_launch = num_launches - 1;
    CHECK_EQ(run(tasks, {inputs, outputs, nullptr, nullptr}),
             num_launches == 0 ? cudaSuccess : cudaErrorInvalidValue);
    shim::fail_launch = -1;
  }
}

// Tasks above the limit of 2^31 vectors are cut; the pieces cover the same index space.
TEST(cut_tasks) {
  for (int seed = 0; seed < 120; ++seed) {
    check::context = "cut tasks, seed " + std::to_string(seed);
    Random random(seed);
    CopyTask task;
    task.src_tensor_idx = task.dst_tensor_idx = 0;
    task.copy.run_bytes = random.chance(0.5) ? random.between(1, 40) : random.between(128, 400);
    task.copy.num_dims = int32_t(random.between(0, kMaxCopyDims));
    int64_t src_pitch = task.copy.run_bytes, dst_pitch = task.copy.run_bytes;
    for (int d = task.copy.num_dims - 1; d >= 0; --d) {
      task.copy.count[d] = random.between(1, 4);
      task.copy.src_stride_bytes[d] = src_pitch + random.between(0, 5);
      task.copy.dst_stride_bytes[d] = dst_pitch;
      src_pitch = task.copy.src_stride_bytes[d] * task.copy.count[d];
      dst_pitch *= task.copy.count[d];
    }
    std::vector<uint8_t> from(src_pitch), whole(dst_pitch, 0), cut(dst_pitch, 0);
    for (size_t i = 0; i < from.size(); ++i) from[i] = uint8_t(i * 37 + 1);
    const void* const inputs[] = {from.data()};
    void* const outputs[] = {whole.data()};
    execute_cpu({&task, 1}, {inputs, outputs, nullptr, nullptr}, {});
    void* const cut_outputs[] = {cut.data()};
    const int64_t max_vectors = random.between(2, 20);
    const CopyBuffers buffers{inputs, cut_outputs, nullptr, nullptr};
    const ResolvedTasks cut_tasks({&task, 1}, buffers, max_vectors);
    for (size_t i = 0; i < cut_tasks.size(); ++i) CHECK(cut_tasks.num_vectors(i) <= max_vectors);
    CHECK_EQ(execute_cuda(cut_tasks, buffers, {}, {}), cudaSuccess);
    CHECK(whole == cut);
  }
}

// The width follows the alignment of addresses, strides and runs; loops of one step do not count.
TEST(vector_bytes) {
  CopyTask task;
  task.copy.run_bytes = 64;
  task.copy.num_dims = 2;
  task.copy.count[0] = 1;
  task.copy.count[1] = 5;
  task.copy.src_stride_bytes[0] = 3;
  task.copy.src_stride_bytes[1] = task.copy.dst_stride_bytes[1] = 128;
  const auto at = [](uintptr_t address) { return reinterpret_cast<const void*>(address); };
  CHECK_EQ(vector_bytes_of(task, at(0x1000), at(0x2010)), 16);
  CHECK_EQ(vector_bytes_of(task, at(0x1008), at(0x2010)), 8);
  CHECK_EQ(vector_bytes_of(task, at(0x1008), at(0x2014)), 4);
  CHECK_EQ(vector_bytes_of(task, at(0x1002), at(0x2014)), 2);
  CHECK_EQ(vector_bytes_of(task, at(0x1000), at(0x2001)), 1);
  task.copy.dst_stride_bytes[1] = 132;
  CHECK_EQ(vector_bytes_of(task, at(0x1000), at(0x2000)), 4);
  task.copy.dst_stride_bytes[1] = 128;
  task.copy.run_bytes = 24;
  CHECK_EQ(vector_bytes_of(task, at(0x1000), at(0x2000)), 8);
  task.arithmetic = Arithmetic::kBFloat16;  // whole vectors or single elements
  CHECK_EQ(vector_bytes_of(task, at(0x1000), at(0x2000)), 2);
}

// Equal tasks are resolved once, unless a buffer has another alignment; addresses are those of the call.
TEST(recent_tasks) {
  std::vector<uint8_t> from(4096), to(4096);
  for (size_t i = 0; i < from.size(); ++i) from[i] = uint8_t(i * 29 + i / 256);
  RecentTasks recent;
  std::vector<const ResolvedTasks*> resolved;
  const auto copy = [&](int64_t offset, int64_t num_bytes) {
    CopyTask task;
    task.src_tensor_idx = task.dst_tensor_idx = 0;
    task.copy.run_bytes = num_bytes;
    const void* const inputs[] = {from.data() + offset};
    void* const outputs[] = {to.data() + offset};
    const CopyBuffers buffers{inputs, outputs, nullptr, nullptr};
    resolved.push_back(&recent.resolve({&task, 1}, buffers));
    std::fill(to.begin(), to.end(), 0);
    CHECK_EQ(execute_cuda(*resolved.back(), buffers, {}, {}), cudaSuccess);
    CHECK(std::equal(to.begin() + offset, to.begin() + offset + num_bytes, from.begin() + offset));
    CHECK(to[offset + num_bytes] == 0);
  };
  for (const int64_t offset : {0, 1024, 1, 17, 1041, 32}) copy(offset, 1000);
  CHECK(resolved[0] == resolved[1] && resolved[0] == resolved[5]);
  CHECK(resolved[2] == resolved[3] && resolved[2] == resolved[4] && resolved[0] != resolved[2]);
  for (int64_t num_bytes = 0; num_bytes < 100; ++num_bytes) copy(3, num_bytes);
}

// One run at every pair of alignments takes as many vectors as an aligned one, and two more at most.
TEST(misaligned_runs) {
  alignas(16) uint8_t memory[2][16] = {};
  for (int pair = 0; pair < 256; ++pair) {
    CopyTask task;
    task.src_tensor_idx = task.dst_tensor_idx = 0;
    task.copy.run_bytes = kMinRunInPieces + 17 * pair;
    const void* const inputs[] = {memory[0] + pair / 16};
    void* const outputs[] = {memory[1] + pair % 16};
    const ResolvedTasks tasks({&task, 1}, {inputs, outputs, nullptr, nullptr});
    CHECK(tasks.num_vectors(0) <= task.copy.run_bytes / 16 + 2);
  }
}

// The bits of a division wherever it is replaced: powers of two, corrected products, their limits.
template <typename T, typename Bits>
void test_scaling_of() {
  Random random(41);
  const auto anything = [&] {
    return std::bit_cast<T>(static_cast<Bits>(
        random.between(std::numeric_limits<int64_t>::min(), std::numeric_limits<int64_t>::max())));
  };
  std::vector<double> divisors{0.1, 1e-30, 1e30, 0x1p-140, 1 << 20, (1 << 20) + 1.0};
  for (int divisor = 1; divisor <= 100; ++divisor) divisors.push_back(divisor);
  for (const double divisor : divisors) {
    check::context = "division by " + std::to_string(divisor);
    const Scaling<T> scale(Scale::divide(divisor));
    for (int i = 0; i < 3000; ++i) {
      using Limits = std::numeric_limits<T>;
      T values[] = {anything(), T(random.between(-1000000, 1000000)) / 7, T(i), T(-0.0)};
      if (i % 4 == 0)
        values[i % 3] =
            std::array{T(0), Limits::infinity(), Limits::denorm_min(), Limits::max()}[i / 4 % 4];
      const auto given = std::to_array(values);
      scale(values);
      for (size_t k = 0; k < given.size(); ++k) {
        const T expected = given[k] / T(divisor);
        CHECK(std::bit_cast<Bits>(values[k]) == std::bit_cast<Bits>(expected) ||
              (std::isnan(values[k]) && std::isnan(expected)));
      }
    }
  }
}

TEST(scaling) {
  test_scaling_of<float, uint32_t>();
  test_scaling_of<double, uint64_t>();
}

// One block for each tile of 16 KiB; a limit of multiprocessors limits the blocks.
TEST(grid) {
  std::vector<uint8_t> from((1 << 20) + 16, 7), to((1 << 20) + 16, 0);
  const void* const inputs[] = {from.data()};
  void* const outputs[] = {to.data()};
  CopyTask task;
  task.src_tensor_idx = task.dst_tensor_idx = 0;
  task.copy.run_bytes = int64_t(to.size());
  for (const int limit : {0, 1, 3, 9}) {
    std::fill(to.begin(), to.end(), 0);
    CHECK_EQ(run({&task, 1}, {inputs, outputs, nullptr, nullptr}, {}, {nullptr, limit}),
             cudaSuccess);
    CHECK(to == from);
    CHECK_EQ(shim::last_block.x, unsigned(limit == 0 ? kThreads : kMaxThreads));
    CHECK_EQ(shim::last_grid.x, unsigned(limit == 0 ? 65 : limit));
  }
  // Narrow vectors do not make more tiles.
  task.copy.num_dims = 1;
  task.copy.run_bytes = 1;
  task.copy.count[0] = 1 << 18;
  task.copy.src_stride_bytes[0] = task.copy.dst_stride_bytes[0] = 2;
  CHECK_EQ(run({&task, 1}, {inputs, outputs, nullptr, nullptr}), cudaSuccess);
  CHECK_EQ(shim::last_grid.x, 16u);
}

// Boxes of one tensor take turns if they are about as long as each other; others follow each other.
TEST(turns) {
  constexpr int64_t kRun = 64, kTileRuns = 256;  // runs of a tile
  std::vector<uint8_t> from(8 << 20), to(8 << 20);
  for (size_t i = 0; i < from.size(); ++i) from[i] = uint8_t(i * 31 + i / 997);
  const void* const inputs[] = {from.data(), from.data()};
  void* const outputs[] = {to.data()};
  // Columns of tables of 8 runs a row: (tensor, number of tiles) of each; and blocks in all.
  struct Boxes {
    std::vector<std::pair<int, int64_t>> boxes;
    unsigned num_blocks;
  };
  for (const auto& [boxes, num_blocks] :
       {Boxes{{{0, 8}, {0, 8}, {0, 8}}, 24}, Boxes{{{0, 8}, {0, 7}, {0, 8}}, 24},
        Boxes{{{0, 8}, {0, 1}, {0, 8}}, 17}, Boxes{{{0, 8}, {1, 7}, {0, 8}, {1, 7}}, 30},
        Boxes{{{0, 1}, {0, 16}}, 17}}) {
    std::vector<CopyTask> tasks;
    std::vector<uint8_t> expected(to.size(), 0);
    int64_t offset = 0;
    for (const auto& [tensor, num_tiles] : boxes) {
      CopyTask& task = tasks.emplace_back();
      task.src_tensor_idx = tensor;
      task.dst_tensor_idx = 0;
      task.src_offset_bytes = (std::ssize(tasks) - 1) * kRun;
      task.dst_offset_bytes = offset;
      task.copy = {};
      task.copy.run_bytes = kRun;
      task.copy.num_dims = 1;
      task.copy.count[0] = num_tiles * kTileRuns;
      task.copy.src_stride_bytes[0] = 8 * kRun;
      task.copy.dst_stride_bytes[0] = kRun;
      for (int64_t row = 0; row < task.copy.count[0]; ++row)
        std::copy_n(from.data() + task.src_offset_bytes + row * 8 * kRun, kRun,
                    expected.data() + offset + row * kRun);
      offset += task.copy.count[0] * kRun;
    }
    std::fill(to.begin(), to.end(), 0);
    CHECK_EQ(run(tasks, {inputs, outputs, nullptr, nullptr}), cudaSuccess);
    CHECK_EQ(shim::last_grid.x, num_blocks);
    CHECK(to == expected);
  }
}

TEST(refused_means) {
  float value = 0;
  const std::vector<const void*> too_many(kMaxMeanSources + 1, &value);
  CHECK_EQ(mean_cuda(&value, too_many, 1, dtypes::kFloat32, {}), cudaErrorInvalidValue);
  CHECK_EQ(mean_cuda(&value, {}, 1, dtypes::kFloat32, {}), cudaErrorInvalidValue);
  CHECK_EQ(mean_cuda(&value, {too_many.data(), 1}, 1, dtypes::kInt32, {}), cudaErrorInvalidValue);
}

TEST(preload) {
  CHECK_EQ(preload_cuda_copy(), cudaSuccess);
  CHECK_EQ(preload_cuda_mean(), cudaSuccess);
  CHECK_EQ(shim::num_preloaded, 22);  // (2 plain + 4 scaled) x 3 capacities + 4 means
}
