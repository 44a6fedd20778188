// Every plan builder, all dtypes, scales, strides and alignments, against the positions model.
#include "cases.h"
#include "mirror.h"
#include "scaling.h"

namespace parts {

namespace {

void execute_on_device(std::span<const CopyTask> tasks, const CopyBuffers& host, const Scale& scale,
                       const CudaLaunch& launch, Random& random) {
  Mirror mirror(tasks, host, random);
  execute(tasks, mirror.buffers(), scale, launch);
  CUDA(cudaStreamSynchronize(launch.stream));
  mirror.finish();
}

world::Options options_of(Random& random, const Scale& scale, const device::Stream& stream) {
  world::Options options;
  options.dense = random.chance(0.3);
  options.transform = scaling::transform_of(scale);
  const auto num_sms = static_cast<int>(random.between(0, 3));
  options.execute = [&random, &stream, num_sms](auto tasks, const CopyBuffers& buffers,
                                                const Scale& factor) {
    execute_on_device(tasks, buffers, factor, {stream, num_sms}, random);
  };
  return options;
}

void random_cases(int64_t num_cases, const device::Stream& stream) {
  for (int64_t seed = 0; seed < num_cases; ++seed) {
    check::context = "values, seed " + std::to_string(seed);
    Random random(seed * 7919 + 5);
    const int size = static_cast<int>(random.between(1, 6));
    const Scale scale = seed % 3 == 0   ? Scale::none()
                        : seed % 3 == 1 ? Scale::divide(size + 2)
                                        : Scale::multiply(0.3);
    const auto ranks = cases::any(random, size, scale);
    const world::Options options = options_of(random, scale, stream);
    world::Simulation(ranks, options, random).run();
  }
}

// Several tiles a task, and more of them than blocks.
void many_tiles(const Scale& scale, const device::Stream& stream) {
  check::context = "values, many tiles";
  Random random(11);
  const auto ranks =
      cases::tokens_to_heads({2, 700, 6, 13}, dtypes::kBFloat16, {300, 0, 400}, {3, 1, 2}, scale);
  const world::Options options = options_of(random, scale, stream);
  world::Simulation(ranks, options, random).run();
}

// One run at every pair of alignments.
void misaligned_runs(const device::Stream& stream) {
  Random random(31);
  for (int64_t src_residue = 0; src_residue < 16; ++src_residue) {
    for (int64_t dst_residue = 0; dst_residue < 16; ++dst_residue) {
      check::context =
          "values, run at " + std::to_string(src_residue) + " to " + std::to_string(dst_residue);
      const CopyTask task = run_task(0, 0, random.between(1, 700));
      std::vector<uint8_t> expected(task.copy.run_bytes);
      for (uint8_t& byte : expected) byte = static_cast<uint8_t>(random.between(0, 255));
      device::Memory source(task.copy.run_bytes, src_residue, random.chance(0.5) ? 64 : 0);
      const device::Memory target(task.copy.run_bytes, dst_residue, random.chance(0.5) ? 64 : 0);
      source.upload(expected.data());
      const void* const inputs[] = {source.data()};
      void* const outputs[] = {target.data()};
      execute({&task, 1}, {inputs, outputs, nullptr, nullptr}, {}, {stream, 0});
      stream.synchronize();
      CHECK(target.download() == expected);
      CHECK(target.surroundings_are_intact());
    }
  }
}

}  // namespace

void values(int64_t num_cases) {
  const device::Stream stream;
  random_cases(num_cases, stream);
  many_tiles(Scale::none(), stream);
  many_tiles(Scale::divide(3), stream);
  misaligned_runs(stream);
}

}  // namespace parts
