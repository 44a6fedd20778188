// Means of all dtypes against reduce_cpu: any number of sources, odd counts and addresses, in place.
#include <memory>

#include "cases.h"
#include "copy/reduce_cpu.h"
#include "parts.h"

namespace parts {

namespace {

std::vector<uint8_t> random_elements(int64_t count, DType dtype, Random& random) {
  std::vector<uint8_t> bytes(count * dtype.itemsize);
  for (int64_t i = 0; i < count; ++i) {
    const double value = double(random.between(-1000, 1000)) / 7;
    const auto single = static_cast<float>(value);
    const uint16_t half =
        dtype == dtypes::kFloat16 ? Float16::store(single) : BFloat16::store(single);
    const void* element = dtype.itemsize == 2   ? static_cast<const void*>(&half)
                          : dtype.itemsize == 4 ? static_cast<const void*>(&single)
                                                : static_cast<const void*>(&value);
    std::memcpy(bytes.data() + i * dtype.itemsize, element, dtype.itemsize);
  }
  return bytes;
}

// The last source is the destination if `in_place`.
void check_mean(DType dtype, int64_t count, int num_sources, bool in_place, Random& random,
                const device::Stream& stream) {
  const bool aligned = random.chance(0.5);
  const auto residue = [&] {
    return aligned ? 0 : dtype.itemsize * random.between(0, 16 / dtype.itemsize - 1);
  };
  std::vector<std::vector<uint8_t>> host;
  std::vector<const void*> host_sources, sources;
  std::vector<std::unique_ptr<device::Memory>> memories;
  for (int k = 0; k < num_sources; ++k) {
    host.push_back(random_elements(count, dtype, random));
    memories.push_back(std::make_unique<device::Memory>(count * dtype.itemsize, residue(), 0));
    memories.back()->upload(host.back().data());
    host_sources.push_back(host.back().data());
    sources.push_back(memories.back()->data());
  }
  if (!in_place)
    memories.push_back(std::make_unique<device::Memory>(count * dtype.itemsize, residue()));
  std::vector<uint8_t> expected(count * dtype.itemsize);
  reduce_cpu(Reduction::kMean, expected.data(), host_sources, count, dtype);
  const CudaLaunch launch{stream, static_cast<int>(random.between(0, 3))};
  CUDA(mean_cuda(memories.back()->data(), sources, count, dtype, launch));
  stream.synchronize();
  CHECK(memories.back()->download() == expected);
  CHECK(memories.back()->surroundings_are_intact());
}

}  // namespace

void mean() {
  const device::Stream stream;
  Random random(2);
  for (const DType dtype : cases::kFloatDTypes) {
    for (const int64_t count : {0, 1, 7, 8, 255, 4099}) {
      for (const int num_sources : {1, 2, 3, 5, 8, 63, 64, 65, kMaxMeanSources}) {
        if (num_sources > 65 && count > 255) continue;
        for (const bool in_place : {false, true}) {
          check::context = "mean of " + std::to_string(num_sources) + " times " +
                           std::to_string(count) + ", itemsize " + std::to_string(dtype.itemsize);
          check_mean(dtype, count, num_sources, in_place, random, stream);
        }
      }
    }
  }
}

}  // namespace parts
