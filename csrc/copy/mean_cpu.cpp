#include <algorithm>
#include <stdexcept>
#include <string>

#include "copy/copy_cpu.h"
#include "copy/float_formats.h"

namespace pipecomm {

namespace {

constexpr int64_t kBlockElements = 2048;  // the sums of a block stay in the L1 cache
constexpr int64_t kMinThreadElements = 1 << 18;

template <typename Format>
void mean_range(void* dst, std::span<const void* const> srcs, int64_t begin, int64_t end) {
  using Storage = typename Format::Storage;
  using Compute = typename Format::Compute;
  const auto num_srcs = static_cast<Compute>(srcs.size());
  Compute sums[kBlockElements];
  for (int64_t block = begin; block < end; block += kBlockElements) {
    const int64_t count = std::min(kBlockElements, end - block);
    std::fill_n(sums, count, Compute{0});
    for (const void* src : srcs) {
      const Storage* from = static_cast<const Storage*>(src) + block;
      for (int64_t i = 0; i < count; ++i) sums[i] += Format::load(from[i]);
    }
    Storage* to = static_cast<Storage*>(dst) + block;
    for (int64_t i = 0; i < count; ++i) to[i] = Format::store(sums[i] / num_srcs);
  }
}

template <typename Format>
void mean_of(void* dst, std::span<const void* const> srcs, int64_t count, ThreadPool* pool) {
  const int64_t max_parts = pool ? pool->num_threads() : 1;
  const int64_t num_parts = std::clamp<int64_t>(count / kMinThreadElements, 1, max_parts);
  if (num_parts == 1) return mean_range<Format>(dst, srcs, 0, count);
  const int64_t part_elements = (count + num_parts - 1) / num_parts;
  pool->parallel_for(static_cast<int>(num_parts), [&](int part) {
    mean_range<Format>(dst, srcs, part * part_elements,
                       std::min(count, (part + 1) * part_elements));
  });
}

}  // namespace

void mean_cpu(void* dst, std::span<const void* const> srcs, int64_t count, DType dtype,
              ThreadPool* pool) {
  if (srcs.empty()) throw std::invalid_argument("the mean of no tensors is not defined");
  switch (arithmetic_of(dtype)) {
    case Arithmetic::kFloat16:
      return mean_of<Float16>(dst, srcs, count, pool);
    case Arithmetic::kBFloat16:
      return mean_of<BFloat16>(dst, srcs, count, pool);
    case Arithmetic::kFloat32:
      return mean_of<Float32>(dst, srcs, count, pool);
    case Arithmetic::kFloat64:
      return mean_of<Float64>(dst, srcs, count, pool);
    case Arithmetic::kBytes:
      break;
  }
  throw std::invalid_argument(
      std::string("only float16, bfloat16, float32 and float64 can be averaged, got ") +
      dtype_name(dtype.code));
}

}  // namespace pipecomm
