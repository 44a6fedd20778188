// Reductions of host memory against sums in a wider type.
#include <bit>
#include <cmath>
#include <functional>
#include <limits>

#include "cases.h"
#include "copy/float_formats.h"
#include "copy/reduce_cpu.h"

using world::Random;

template <typename T>
std::vector<const void*> pointers_to(const std::vector<std::vector<T>>& tensors) {
  std::vector<const void*> pointers;
  for (const auto& tensor : tensors) pointers.push_back(tensor.data());
  return pointers;
}

TEST(mean) {
  const std::vector<std::vector<float>> pair{{1, 0.1f, 3}, {5, 0.2f, -3}};
  std::vector<float> result(3);
  reduce_cpu(Reduction::kMean, result.data(), pointers_to(pair), 3, dtypes::kFloat32);
  CHECK_EQ(result[0], 3.0f);
  CHECK_EQ(result[1], (0.1f + 0.2f) / 2.0f);
  CHECK_EQ(result[2], 0.0f);

  // fp64 is averaged in fp64: more than a float holds.
  const std::vector<std::vector<double>> doubles{{1.0 + 1e-12}, {2.0}, {4.0}};
  double mean = 0;
  reduce_cpu(Reduction::kMean, &mean, pointers_to(doubles), 1, dtypes::kFloat64);
  CHECK_EQ(mean, (1.0 + 1e-12 + 2.0 + 4.0) / 3.0);

  // Summed in fp32, not in the dtype: 1 + 2^-8 + ... would vanish in bf16.
  const uint16_t one = 0x3f80, small = BFloat16::store(1.0f / 256);
  const std::vector<std::vector<uint16_t>> halves{{one}, {small}, {small}, {small}};
  uint16_t half_mean = 0;
  reduce_cpu(Reduction::kMean, &half_mean, pointers_to(halves), 1, dtypes::kBFloat16);
  CHECK_EQ(half_mean, BFloat16::store((1.0f + 3.0f / 256) / 4));

  // Many blocks, the result in place of a source.
  Random random(1);
  const int64_t count = 1000003;
  std::vector<std::vector<uint16_t>> fp16(3, std::vector<uint16_t>(count));
  for (auto& tensor : fp16) {
    for (uint16_t& value : tensor) value = Float16::store(float(random.between(-1000, 1000)) / 7);
  }
  const auto sources = fp16;
  reduce_cpu(Reduction::kMean, fp16[1].data(), pointers_to(fp16), count, dtypes::kFloat16);
  bool is_equal = true;
  for (int64_t i = 0; i < count; ++i) {
    float sum = 0;
    for (const auto& tensor : sources) sum += Float16::load(tensor[i]);
    is_equal = is_equal && fp16[1][i] == Float16::store(sum / 3.0f);
  }
  CHECK(is_equal);
}

// Numbers of any bits, and what an element of `dtype` becomes one by one in unsigned or signed 64 bits.
template <typename T>
void check_integers(DType dtype, Random& random) {
  const std::pair<Reduction, std::function<T(T, T)>> kinds[] = {
      {Reduction::kSum, [](T a, T b) { return T(uint64_t(a) + uint64_t(b)); }},
      {Reduction::kProduct, [](T a, T b) { return T(uint64_t(a) * uint64_t(b)); }},
      {Reduction::kMin, [](T a, T b) { return std::min(a, b); }},
      {Reduction::kMax, [](T a, T b) { return std::max(a, b); }},
      {Reduction::kBitAnd, [](T a, T b) { return T(a & b); }},
      {Reduction::kBitOr, [](T a, T b) { return T(a | b); }},
      {Reduction::kBitXor, [](T a, T b) { return T(a ^ b); }}};
  for (const auto& [reduction, combine] : kinds)
    for (size_t num_sources : {1, 2, 3, 8})
      for (size_t count : {0, 1, 31, 4099}) {
        std::vector<std::vector<T>> tensors(num_sources, std::vector<T>(count));
        for (auto& tensor : tensors)
          for (T& value : tensor) value = T(random.between(INT64_MIN / 2, INT64_MAX / 2));
        std::vector<T> expected = tensors[0], result(count);
        for (size_t idx = 1; idx < num_sources; ++idx)
          for (size_t i = 0; i < count; ++i) expected[i] = combine(expected[i], tensors[idx][i]);
        CHECK(can_reduce(reduction, dtype));
        reduce_cpu(reduction, result.data(), pointers_to(tensors), int64_t(count), dtype);
        CHECK(result == expected);
        reduce_cpu(reduction, tensors.back().data(), pointers_to(tensors), int64_t(count), dtype);
        CHECK(tensors.back() == expected);
      }
}

TEST(integers) {
  Random random(2);
  check_integers<uint8_t>(dtypes::kUInt8, random);
  check_integers<int8_t>(dtypes::kInt8, random);
  check_integers<uint16_t>(dtypes::kUInt16, random);
  check_integers<int16_t>(dtypes::kInt16, random);
  check_integers<uint32_t>(dtypes::kUInt32, random);
  check_integers<int32_t>(dtypes::kInt32, random);
  check_integers<uint64_t>(dtypes::kUInt64, random);
  check_integers<int64_t>(dtypes::kInt64, random);
}

TEST(bools) {
  const std::vector<std::vector<uint8_t>> tensors{{0, 0, 1, 1}, {0, 1, 0, 1}, {0, 1, 1, 1}};
  using Bytes = std::vector<uint8_t>;
  const std::pair<Reduction, Bytes> kinds[] = {
      {Reduction::kSum, {0, 1, 1, 1}},   {Reduction::kMax, {0, 1, 1, 1}},
      {Reduction::kBitOr, {0, 1, 1, 1}}, {Reduction::kProduct, {0, 0, 0, 1}},
      {Reduction::kMin, {0, 0, 0, 1}},   {Reduction::kBitAnd, {0, 0, 0, 1}},
      {Reduction::kBitXor, {0, 0, 0, 1}}};
  for (const auto& [reduction, expected] : kinds) {
    Bytes result(4);
    reduce_cpu(reduction, result.data(), pointers_to(tensors), 4, dtypes::kBool);
    CHECK(result == expected);
  }
}

// Every element at every place of a vector, with numbers that are none, and both zeros.
TEST(smallest_and_largest_floats) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  constexpr float kMore = std::numeric_limits<float>::infinity();
  const std::vector<float> values{0, -0.0f, 1, -1, kMore, -kMore, kNan, 1e-40f};
  for (const float a : values)
    for (const float b : values)
      for (size_t count : {1, 8, 19}) {
        const std::vector<std::vector<float>> tensors{std::vector<float>(count, a),
                                                      std::vector<float>(count, b)};
        const bool is_nan = std::isnan(a) || std::isnan(b);
        std::vector<float> low(count), high(count);
        reduce_cpu(Reduction::kMin, low.data(), pointers_to(tensors), int64_t(count),
                   dtypes::kFloat32);
        reduce_cpu(Reduction::kMax, high.data(), pointers_to(tensors), int64_t(count),
                   dtypes::kFloat32);
        for (size_t i = 0; i < count; ++i) {
          CHECK(is_nan ? std::isnan(low[i]) : low[i] == std::min(a, b));
          CHECK(is_nan ? std::isnan(high[i]) : high[i] == std::max(a, b));
        }
      }
}

// One rounding at the end: the sum in the dtype itself would lose the small ones.
TEST(halves_are_reduced_in_fp32) {
  Random random(3);
  for (const size_t num_sources : {2, 3, 5}) {
    std::vector<std::vector<uint16_t>> tensors(num_sources, std::vector<uint16_t>(1009));
    for (auto& tensor : tensors)
      for (uint16_t& value : tensor) value = BFloat16::store(float(random.between(-999, 999)) / 7);
    std::vector<uint16_t> result(1009);
    reduce_cpu(Reduction::kSum, result.data(), pointers_to(tensors), 1009, dtypes::kBFloat16);
    for (size_t i = 0; i < result.size(); ++i) {
      float sum = BFloat16::load(tensors[0][i]);
      for (size_t idx = 1; idx < num_sources; ++idx) sum += BFloat16::load(tensors[idx][i]);
      CHECK_EQ(result[i], BFloat16::store(sum));
    }
  }
}

// The conversions of the CPU, where it has them, and those of Float16 at the ends of blocks: each half that
// there is, and combinations of any.
TEST(halves_of_any_bits) {
  using Combine = std::function<float(float, float)>;
  const std::pair<Reduction, Combine> kinds[] = {
      {Reduction::kSum, [](float a, float b) { return a + b; }},
      {Reduction::kMean, [](float a, float b) { return a + b; }},
      {Reduction::kProduct, [](float a, float b) { return a * b; }},
      {Reduction::kMin, [](float a, float b) { return b < a || b != b ? b : a; }},
      {Reduction::kMax, [](float a, float b) { return b > a || b != b ? b : a; }}};
  Random random(4);
  for (const auto& [reduction, combine] : kinds)
    for (const size_t num_sources : {1, 2, 3}) {
      std::vector<std::vector<uint16_t>> tensors(num_sources, std::vector<uint16_t>(65536 + 13));
      for (size_t i = 0; i < tensors[0].size(); ++i) tensors[0][i] = static_cast<uint16_t>(i);
      for (size_t idx = 1; idx < num_sources; ++idx)
        for (uint16_t& half : tensors[idx]) half = static_cast<uint16_t>(random.between(0, 65535));
      std::vector<uint16_t> result(tensors[0].size());
      reduce_cpu(reduction, result.data(), pointers_to(tensors), int64_t(result.size()),
                 dtypes::kFloat16);
      for (size_t i = 0; i < result.size(); ++i) {
        float expected = Float16::load(tensors[0][i]);
        for (size_t idx = 1; idx < num_sources; ++idx)
          expected = combine(expected, Float16::load(tensors[idx][i]));
        if (reduction == Reduction::kMean) expected /= float(num_sources);
        const uint16_t bits = Float16::store(expected);
        if (std::isnan(expected))  // which of two it is, and its sign, the compiler may choose
          CHECK_EQ(result[i] & 0x7fff, bits & 0x7fff);
        else
          CHECK_EQ(result[i], bits);
      }
    }
}

TEST(what_is_not_defined) {
  std::vector<float> memory(3);
  const std::vector<const void*> one{memory.data()};
  CHECK(!can_reduce(Reduction::kMean, dtypes::kInt32));
  CHECK(!can_reduce(Reduction::kBitAnd, dtypes::kFloat32));
  CHECK(!can_reduce(Reduction::kSum, dtypes::kComplex128));
  CHECK_INVALID("not defined for int32",
                reduce_cpu(Reduction::kMean, memory.data(), one, 3, dtypes::kInt32));
  CHECK_INVALID("reduction of no tensors",
                reduce_cpu(Reduction::kSum, memory.data(), {}, 3, dtypes::kFloat32));
}

TEST(a_result_that_overlaps_its_sources) {
  const int64_t count = 600'000;
  for (const int64_t begin : {0, 1, 5, 4000}) {
    for (const size_t num_sources : {size_t{1}, size_t{2}, size_t{3}}) {
      std::vector<int32_t> memory(count + 4000), ones(count, 1);
      std::iota(memory.begin(), memory.end(), 0);
      std::vector<const void*> sources(num_sources, ones.data());
      sources.back() = memory.data() + 5;
      int32_t* const result = memory.data() + begin;
      reduce_cpu(Reduction::kSum, result, sources, count, dtypes::kInt32);
      bool is_right = true;
      for (int64_t i = 0; i < count; ++i)
        is_right = is_right && result[i] == i + 5 + int64_t(num_sources) - 1;
      CHECK(is_right);
    }
  }
}
