#include "copy/reduce_cpu.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "copy/float_formats.h"

namespace pipecomm {
namespace {

constexpr int64_t kBlockElements = 2048;  // the results of a block stay in the L1 cache

// ---- elements: the format of an integer is its type; sums and products are unsigned ----

template <typename T>
struct Integer {
  using Storage = T;
  using Compute = T;
  static T load(T value) { return value; }
  static T store(T value) { return value; }
};

// Bytes other than 0 and 1 are true, too: torch views uint8 tensors as bool.
struct Bool : Integer<uint8_t> {
  static uint8_t load(uint8_t value) { return value != 0; }
};

template <typename Format>
constexpr bool kIsFloat = std::is_floating_point_v<typename Format::Compute>;

template <typename T>
T added(T a, T b) {
  if constexpr (std::is_floating_point_v<T>) {
    return a + b;
  } else {
    return static_cast<T>(std::make_unsigned_t<T>(a) + std::make_unsigned_t<T>(b));
  }
}

template <typename T>
T multiplied(T a, T b) {
  if constexpr (std::is_floating_point_v<T>) {
    return a * b;
  } else {  // in 64 bits: two uint16_t would be multiplied as signed ints
    return static_cast<T>(uint64_t(a) * uint64_t(b));
  }
}

template <Reduction kReduction, typename Format>
struct Combine {
  using T = typename Format::Compute;
  T operator()(T a, T b) const {
    if constexpr (kReduction == Reduction::kSum || kReduction == Reduction::kMean)
      return added(a, b);
    else if constexpr (kReduction == Reduction::kProduct)
      return multiplied(a, b);
    else if constexpr (kReduction == Reduction::kMin)
      return b < a || b != b ? b : a;
    else if constexpr (kReduction == Reduction::kMax)
      return b > a || b != b ? b : a;
    else if constexpr (kReduction == Reduction::kBitAnd)
      return static_cast<T>(a & b);
    else if constexpr (kReduction == Reduction::kBitOr)
      return static_cast<T>(a | b);
    else
      return static_cast<T>(a ^ b);
  }
};

// ---- loops ----

struct Job {
  void* dst;
  std::span<const void* const> srcs;
  int64_t count;
};

template <Reduction kReduction, typename Format>
[[gnu::always_inline]] inline void reduce_range(const Job& job) {
  using Storage = typename Format::Storage;
  using Compute = typename Format::Compute;
  constexpr Combine<kReduction, Format> combine;
  const auto num_srcs = static_cast<Compute>(job.srcs.size());
  const auto source = [&](size_t idx) { return static_cast<const Storage*>(job.srcs[idx]); };
  const auto finished = [&](Compute value) {
    return Format::store(kReduction == Reduction::kMean ? Compute(value / num_srcs) : value);
  };
  Storage* const dst = static_cast<Storage*>(job.dst);
  if (job.srcs.size() == 2) {
    const Storage *a = source(0), *b = source(1);
    for (int64_t i = 0; i < job.count; ++i)
      dst[i] = finished(combine(Format::load(a[i]), Format::load(b[i])));
    return;
  }
  Compute results[kBlockElements];
  for (int64_t block = 0; block < job.count; block += kBlockElements) {
    const int64_t count = std::min(kBlockElements, job.count - block);
    const Storage* from = source(0) + block;
    for (int64_t i = 0; i < count; ++i) results[i] = Format::load(from[i]);
    for (size_t idx = 1; idx < job.srcs.size(); ++idx) {
      from = source(idx) + block;
      for (int64_t i = 0; i < count; ++i) results[i] = combine(results[i], Format::load(from[i]));
    }
    for (int64_t i = 0; i < count; ++i) dst[block + i] = finished(results[i]);
  }
}

// The same loops for each instruction set, chosen by the CPU's features.
#if defined(__x86_64__)
template <Reduction kReduction, typename Format>
[[gnu::target("avx2")]] void reduce_avx2(const Job& job) {
  reduce_range<kReduction, Format>(job);
}

// The CPU's conversions of 8 halves at once, with the bits of Float16's.
[[gnu::target("avx2,f16c")]] void load_halves(const uint16_t* halves, float* floats,
                                              int64_t count) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8)
    _mm256_storeu_ps(
        floats + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(halves + i))));
  for (; i < count; ++i) floats[i] = Float16::load(halves[i]);
}

[[gnu::target("avx2,f16c")]] void store_halves(const float* floats, uint16_t* halves,
                                               int64_t count) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  const __m256 nan = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000));
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m256 values = _mm256_loadu_ps(floats + i);
    // Of a NaN the CPU would keep some bits.
    const __m256 plain_nan = _mm256_or_ps(_mm256_and_ps(values, sign), nan);
    const __m256 is_nan = _mm256_cmp_ps(values, values, _CMP_UNORD_Q);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(halves + i),
                     _mm256_cvtps_ph(_mm256_blendv_ps(values, plain_nan, is_nan),
                                     _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  for (; i < count; ++i) halves[i] = Float16::store(floats[i]);
}

template <Reduction kReduction>
[[gnu::target("avx2,f16c")]] void reduce_halves(const Job& job) {
  constexpr Combine<kReduction, Float16> combine;
  const auto num_srcs = static_cast<float>(job.srcs.size());
  float results[kBlockElements], operands[kBlockElements];
  for (int64_t block = 0; block < job.count; block += kBlockElements) {
    const int64_t count = std::min(kBlockElements, job.count - block);
    const auto load = [&](size_t idx, float* floats) {
      load_halves(static_cast<const uint16_t*>(job.srcs[idx]) + block, floats, count);
    };
    load(0, results);
    for (size_t idx = 1; idx < job.srcs.size(); ++idx) {
      load(idx, operands);
      for (int64_t i = 0; i < count; ++i) results[i] = combine(results[i], operands[i]);
    }
    if (kReduction == Reduction::kMean)
      for (int64_t i = 0; i < count; ++i) results[i] /= num_srcs;
    store_halves(results, static_cast<uint16_t*>(job.dst) + block, count);
  }
}
#endif

template <Reduction kReduction, typename Format>
void reduce_baseline(const Job& job) {
  reduce_range<kReduction, Format>(job);
}

using Loop = void (*)(const Job& job);

template <Reduction kReduction, typename Format>
Loop loop_of() {
#if defined(__x86_64__)
  if constexpr (std::is_same_v<Format, Float16>)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c"))
      return reduce_halves<kReduction>;
  if (__builtin_cpu_supports("avx2")) return reduce_avx2<kReduction, Format>;
#endif
  return reduce_baseline<kReduction, Format>;
}

// Null: not defined.
template <typename Format>
Loop loop_for(Reduction reduction) {
  constexpr bool is_float = kIsFloat<Format>;
  switch (reduction) {
    case Reduction::kSum:
      return loop_of<Reduction::kSum, Format>();
    case Reduction::kMean:
      if constexpr (is_float) return loop_of<Reduction::kMean, Format>();
      break;
    case Reduction::kProduct:
      return loop_of<Reduction::kProduct, Format>();
    case Reduction::kMin:
      return loop_of<Reduction::kMin, Format>();
    case Reduction::kMax:
      return loop_of<Reduction::kMax, Format>();
    case Reduction::kBitAnd:
      if constexpr (!is_float) return loop_of<Reduction::kBitAnd, Format>();
      break;
    case Reduction::kBitOr:
      if constexpr (!is_float) return loop_of<Reduction::kBitOr, Format>();
      break;
    case Reduction::kBitXor:
      if constexpr (!is_float) return loop_of<Reduction::kBitXor, Format>();
      break;
  }
  return nullptr;
}

// The equivalent reduction for bools.
Reduction of_bits(Reduction reduction) {
  switch (reduction) {
    case Reduction::kSum:
    case Reduction::kMax:
      return Reduction::kBitOr;
    case Reduction::kProduct:
    case Reduction::kMin:
      return Reduction::kBitAnd;
    default:
      return reduction;
  }
}

Loop loop_for(Reduction reduction, DType dtype) {
  switch (arithmetic_of(dtype)) {
    case Arithmetic::kFloat16:
      return loop_for<Float16>(reduction);
    case Arithmetic::kBFloat16:
      return loop_for<BFloat16>(reduction);
    case Arithmetic::kFloat32:
      return loop_for<Float32>(reduction);
    case Arithmetic::kFloat64:
      return loop_for<Float64>(reduction);
    case Arithmetic::kBytes:
      break;
  }
  if (dtype == dtypes::kBool) return loop_for<Bool>(of_bits(reduction));
  if (dtype == dtypes::kUInt8) return loop_for<Integer<uint8_t>>(reduction);
  if (dtype == dtypes::kInt8) return loop_for<Integer<int8_t>>(reduction);
  if (dtype == dtypes::kUInt16) return loop_for<Integer<uint16_t>>(reduction);
  if (dtype == dtypes::kInt16) return loop_for<Integer<int16_t>>(reduction);
  if (dtype == dtypes::kUInt32) return loop_for<Integer<uint32_t>>(reduction);
  if (dtype == dtypes::kInt32) return loop_for<Integer<int32_t>>(reduction);
  if (dtype == dtypes::kUInt64) return loop_for<Integer<uint64_t>>(reduction);
  if (dtype == dtypes::kInt64) return loop_for<Integer<int64_t>>(reduction);
  return nullptr;
}

}  // namespace

bool can_reduce(Reduction reduction, DType dtype) { return loop_for(reduction, dtype) != nullptr; }

void reduce_cpu(Reduction reduction, void* dst, std::span<const void* const> srcs, int64_t count,
                DType dtype) {
  if (srcs.empty()) throw std::invalid_argument("the reduction of no tensors is not defined");
  const Loop loop = loop_for(reduction, dtype);
  if (!loop)
    throw std::invalid_argument(std::string("this reduction is not defined for ") +
                                dtype_name(dtype.code));
  const int64_t num_bytes = count * dtype.itemsize;
  auto* const begin = static_cast<std::byte*>(dst);
  const auto is_cut = [&](const void* src) {
    const auto* const from = static_cast<const std::byte*>(src);
    return from != begin && from < begin + num_bytes && begin < from + num_bytes;
  };
  if (std::ranges::any_of(srcs, is_cut)) {
    const auto result = std::make_unique_for_overwrite<std::byte[]>(num_bytes);
    loop({result.get(), srcs, count});
    std::copy_n(result.get(), num_bytes, begin);
  } else {
    loop({dst, srcs, count});
  }
}

}  // namespace pipecomm
