// The CUDA executor, compiled for the host by shim/cuda_runtime.h, against the positions model.
#include <limits>

#include "cases.h"
#include "copy/copy_cuda.cu"
#include "scaling.h"

namespace {

using namespace pipecomm;
using world::Options;
using world::Random;

void test_divisor() {
  check::context = "divisor";
  Random random(1);
  const int64_t largest = std::numeric_limits<int32_t>::max();
  for (int i = 0; i < 20000; ++i) {
    const int64_t bound = int64_t{1} << random.between(0, 31);
    const auto divisor = static_cast<uint32_t>(random.between(1, std::min(bound, largest)));
    const Divisor by(divisor);
    for (int64_t n : {int64_t{0}, random.between(0, largest), largest, largest / divisor * divisor,
                      largest / divisor * divisor - 1}) {
      CHECK_EQ(by.divide(static_cast<uint32_t>(n)), n / divisor);
    }
  }
}

Options cuda_options(Random& random, const Scale& scale) {
  Options options;
  options.dense = random.chance(0.3);
  if (!scale.is_none()) {
    options.transform = [scale](uint8_t* element, DType dtype) {
      scaling::scale_element(element, dtype, scale);
    };
  }
  shim::num_sms = static_cast<int>(random.between(1, 3));
  const int limit = static_cast<int>(random.between(0, 2));
  options.execute = [limit](auto tasks, const CopyBuffers& buffers, const Scale& factor) {
    CHECK_EQ(execute_cuda(tasks, buffers, factor, {nullptr, limit}), cudaSuccess);
  };
  return options;
}

void test_random_cases(int num_cases) {
  for (int seed = 0; seed < num_cases; ++seed) {
    check::context = "cuda, seed " + std::to_string(seed);
    Random random(seed * 7919 + 5);
    const int size = static_cast<int>(random.between(1, 6));
    const Scale scale = seed % 3 == 0   ? Scale::none()
                        : seed % 3 == 1 ? Scale::divide(size + 2)
                                        : Scale::multiply(0.3);
    const auto ranks = cases::any(random, size, scale);
    const Options options = cuda_options(random, scale);
    world::Simulation(ranks, options, random).run();
  }
}

// Several tiles a task, and far more blocks' worth of tiles than blocks.
void test_large_tasks() {
  check::context = "cuda, many tiles";
  Random random(11);
  const Dims global{2, 700, 6, 13};
  const Sizes heads{3, 1, 2}, tokens{300, 0, 400};
  std::vector<world::Rank> ranks(3);
  for (int r = 0; r < 3; ++r) {
    ranks[r].inputs = {world::Held::along(global, 1, cases::positions_of_piece(tokens, r))};
    ranks[r].outputs = {world::Held::along(global, 2, cases::positions_of_piece(heads, r))};
    ranks[r].plan = all_to_all_plan(
        {r, 3}, {{{ranks[r].inputs[0].shape(), dtypes::kBFloat16}, heads, tokens}}, 2, 1);
  }
  const Options options = cuda_options(random, {});
  world::Simulation(ranks, options, random).run();
}

// As many launches as 200 tasks each need, all tasks run once.
void test_number_of_launches() {
  check::context = "cuda launches";
  std::vector<uint8_t> from(500 * 3), to(500 * 3, 0);
  for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<uint8_t>(i * 31 + 7);
  const void* const inputs[] = {from.data()};
  void* const outputs[] = {to.data()};
  for (const auto& [num_tasks, num_launches] :
       {std::pair{0, 0}, {1, 1}, {25, 1}, {26, 1}, {200, 1}, {201, 2}, {500, 3}}) {
    std::vector<CopyTask> tasks(num_tasks);
    for (int i = 0; i < num_tasks; ++i) {
      tasks[i].src_tensor_idx = tasks[i].dst_tensor_idx = 0;
      tasks[i].src_offset_bytes = tasks[i].dst_offset_bytes = i * 3;
      tasks[i].copy.run_bytes = 3;
    }
    std::fill(to.begin(), to.end(), 0);
    shim::num_launches = 0;
    CHECK_EQ(execute_cuda(tasks, {inputs, outputs, nullptr, nullptr}, {}, {}), cudaSuccess);
    CHECK_EQ(shim::num_launches, num_launches);
    CHECK(std::equal(to.begin(), to.begin() + num_tasks * 3, from.begin()));
    CHECK(
        std::all_of(to.begin() + num_tasks * 3, to.end(), [](uint8_t byte) { return byte == 0; }));

    shim::num_launches = 0;
    shim::fail_launch = num_launches - 1;
    CHECK_EQ(execute_cuda(tasks, {inputs, outputs, nullptr, nullptr}, {}, {}),
             num_launches == 0 ? cudaSuccess : cudaErrorInvalidValue);
    shim::fail_launch = -1;
  }
}

// Tasks above the limit of 2^31 vectors are cut; the pieces cover the same index space.
void test_cut_tasks() {
  for (int seed = 0; seed < 300; ++seed) {
    check::context = "cut tasks, seed " + std::to_string(seed);
    Random random(seed);
    CopyTask task;
    task.src_tensor_idx = task.dst_tensor_idx = 0;
    task.copy.run_bytes = random.between(1, 40);
    task.copy.num_dims = static_cast<int32_t>(random.between(0, kMaxCopyDims));
    int64_t src_pitch = task.copy.run_bytes, dst_pitch = task.copy.run_bytes;
    for (int d = task.copy.num_dims - 1; d >= 0; --d) {
      task.copy.count[d] = random.between(1, 4);
      task.copy.src_stride_bytes[d] = src_pitch + random.between(0, 5);
      task.copy.dst_stride_bytes[d] = dst_pitch;
      src_pitch = task.copy.src_stride_bytes[d] * task.copy.count[d];
      dst_pitch *= task.copy.count[d];
    }
    std::vector<uint8_t> from(src_pitch), whole(dst_pitch, 0), cut(dst_pitch, 0);
    for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<uint8_t>(i * 37 + 1);
    const void* const inputs[] = {from.data()};
    void* const outputs[] = {whole.data()};
    execute_cpu({&task, 1}, {inputs, outputs, nullptr, nullptr}, {});
    void* const cut_outputs[] = {cut.data()};
    const int64_t max_vectors = random.between(1, 20);
    for (const VectorTask& piece :
         vector_tasks({&task, 1}, {inputs, cut_outputs, nullptr, nullptr}, max_vectors)) {
      CHECK(piece.num_vectors <= max_vectors);
      for (uint32_t v = 0; v < piece.num_vectors; ++v) {
        const VectorOffsets offsets = piece.offsets_of(v);
        std::memcpy(piece.dst + offsets.dst_bytes, piece.src + offsets.src_bytes,
                    piece.vector_bytes);
      }
    }
    CHECK(whole == cut);
  }
}

// The width follows the alignment of addresses, strides and runs; loops of one step do not count.
void test_vector_bytes() {
  check::context = "vector bytes";
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

void test_mean() {
  check::context = "cuda mean";
  Random random(2);
  for (DType dtype : cases::kFloatDTypes) {
    for (int64_t count : {0, 1, 7, 8, 255, 4099}) {
      for (int num_sources : {1, 2, 5, kMaxMeanSources}) {
        for (int64_t misalignment : {0, 1}) {
          const int64_t bytes = (count + misalignment) * dtype.itemsize;
          std::vector<std::vector<uint8_t>> sources(num_sources, std::vector<uint8_t>(bytes));
          std::vector<const void*> pointers;
          for (auto& source : sources) {
            for (int64_t i = 0; i < count + misalignment; ++i) {
              const double value = double(random.between(-1000, 1000)) / 7;
              const float single = static_cast<float>(value);
              const uint16_t half =
                  dtype == dtypes::kFloat16 ? Float16::store(single) : BFloat16::store(single);
              const void* element = dtype.itemsize == 2   ? static_cast<const void*>(&half)
                                    : dtype.itemsize == 4 ? static_cast<const void*>(&single)
                                                          : static_cast<const void*>(&value);
              std::memcpy(source.data() + i * dtype.itemsize, element, dtype.itemsize);
            }
            pointers.push_back(source.data() + misalignment * dtype.itemsize);
          }
          std::vector<uint8_t> expected(count * dtype.itemsize), result(count * dtype.itemsize);
          mean_cpu(expected.data(), pointers, count, dtype);
          CHECK_EQ(mean_cuda(result.data(), pointers, count, dtype, {}), cudaSuccess);
          CHECK(expected == result);
        }
      }
    }
  }
  float value = 0;
  const std::vector<const void*> too_many(kMaxMeanSources + 1, &value);
  CHECK_EQ(mean_cuda(&value, too_many, 1, dtypes::kFloat32, {}), cudaErrorInvalidValue);
  CHECK_EQ(mean_cuda(&value, {}, 1, dtypes::kFloat32, {}), cudaErrorInvalidValue);
  CHECK_EQ(mean_cuda(&value, {too_many.data(), 1}, 1, dtypes::kInt32, {}), cudaErrorInvalidValue);
}

void test_preload() {
  check::context = "preload";
  CHECK_EQ(preload_cuda_copy(), cudaSuccess);
  CHECK_EQ(shim::num_preloaded, 16);  // (2 plain + 4 scaled) x 2 capacities + 4 means
}

}  // namespace

int main(int argc, char** argv) {
  test_divisor();
  test_random_cases(argc > 1 ? std::atoi(argv[1]) : 600);
  test_large_tasks();
  test_number_of_launches();
  test_cut_tasks();
  test_vector_bytes();
  test_mean();
  test_preload();
  return check::report("test_copy_cuda");
}
