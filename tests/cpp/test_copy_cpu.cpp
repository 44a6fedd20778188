// The CPU executor: threads, scaling, means, ranges of messages, forks.
#include <sys/wait.h>
#include <unistd.h>

#include "cases.h"
#include "copy/copy_cpu.h"
#include "copy/float_formats.h"
#include "scaling.h"

using world::Options;
using world::Random;

// Every fp16 there is, both ways, against the compiler's _Float16; and floats on both sides of
// every rounding boundary.
TEST(float16) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto half = uint16_t(bits);
    _Float16 reference;
    std::memcpy(&reference, &half, 2);
    const float value = Float16::load(half);
    if (reference != reference) {
      CHECK(value != value);
      CHECK((Float16::store(value) & 0x7fff) > 0x7c00);
      continue;
    }
    CHECK(value == float(reference));
    CHECK_EQ(Float16::store(value), half);
    const uint32_t float_value = float_bits(value);
    for (uint32_t neighbour : {0x0001u, 0x0fffu, 0x1000u, 0x1001u, 0x1fffu, 0x800u << 13}) {
      const float moved = float_from_bits(float_value + neighbour);
      if (moved != moved) continue;
      const auto expected = static_cast<_Float16>(moved);
      uint16_t expected_bits;
      std::memcpy(&expected_bits, &expected, 2);
      CHECK_EQ(Float16::store(moved), expected_bits);
    }
  }
}

TEST(bfloat16) {
  Random random(3);
  for (uint32_t high = 0; high < 0x10000; ++high) {
    CHECK_EQ(float_bits(BFloat16::load(uint16_t(high))), high << 16);
    for (uint32_t low : {0u, 1u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
      const float value = float_from_bits(high << 16 | low);
      CHECK_EQ(BFloat16::store(value), scaling::nearest_bfloat16(value));
    }
  }
}

// A case large enough for several slabs and threads.
TEST(threads) {
  for (int num_threads : {1, 2, 7}) {
    ThreadPool pool(num_threads);
    for (int seed = 0; seed < 2; ++seed) {
      check::context = std::to_string(num_threads) + " threads, seed " + std::to_string(seed);
      Random random(seed);
      const int64_t num_tokens = 1700 + seed;
      const Scale scale = seed == 1 ? Scale::divide(3) : Scale::none();
      const auto ranks = cases::tokens_to_heads(
          {2, num_tokens, 11, 16 + seed}, scale.is_none() ? dtypes::kComplex128 : dtypes::kFloat64,
          cases::random_sizes(random, num_tokens, 3), cases::dealt_sizes(11, 3), scale);
      Options options;
      options.dense = true;
      options.transform = scaling::transform_of(scale);
      options.execute = [&pool](auto tasks, const CopyBuffers& buffers, const Scale& factor) {
        execute_cpu(tasks, buffers, factor, &pool);
      };
      world::Simulation(ranks, options, random).run();
    }
  }
}

TEST(pool) {
  ThreadPool pool(4);
  for (int round = 0; round < 200; ++round) {
    std::vector<std::atomic<int>> calls(round % 9);
    pool.parallel_for(round % 9, [&](int part) { ++calls[part]; });
    for (auto& count : calls) CHECK_EQ(count.load(), 1);
  }
  CHECK_EQ(ThreadPool(0).num_threads(), 1);
  ThreadPool never_used(3);
}

// A child that was forked while threads exist has none; it works alone and ends.
TEST(fork) {
#if !defined(__SANITIZE_THREAD__)
  check::context = "fork";
  auto pool = std::make_unique<ThreadPool>(3);
  pool->parallel_for(8, [](int) {});
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    std::atomic<int> sum = 0;
    pool->parallel_for(8, [&](int part) { sum += part; });
    pool.reset();
    _exit(sum == 28 ? 0 : 1);
  }
  int status = -1;
  CHECK_EQ(waitpid(child, &status, 0), child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
#endif
}

TEST(range_errors) {
  const TensorSpec tensor{{2, 3, 4}, dtypes::kFloat32};
  for (const Scale& scale : {Scale::none(), Scale::multiply(2)}) {
    const ExchangePlan plan = all_to_all_plan({0, 2}, {{tensor, {2, 2}, {3, 3}}}, 2, 1, scale);
    const LoweredExchange exchange = lower(plan, {StridedLayout::contiguous(plan.inputs[0])},
                                           {StridedLayout::contiguous(plan.outputs[0])});
    std::vector<float> input(24), output(24);
    std::vector<char> chunk(64);
    const void* const inputs[] = {input.data()};
    void* const outputs[] = {output.data()};
    const CopyBuffers buffers{inputs, outputs, nullptr, nullptr};
    const LoweredMessage& send = exchange.sends[0];
    const LoweredMessage& recv = exchange.recvs[0];
    CHECK_INVALID("bytes [0, 49) lie outside a message of 48 bytes",
                  pack_range(exchange, send, buffers, 0, 49, chunk.data()));
    CHECK_INVALID("bytes [5, 4)", pack_range(exchange, send, buffers, 5, 4, chunk.data()));
    CHECK_INVALID("bytes [-1, 4)", unpack_range(exchange, recv, buffers, -1, 4, chunk.data()));
    if (!scale.is_none()) {
      CHECK_INVALID("multiples of 8 bytes, got [0, 12)",
                    pack_range(exchange, send, buffers, 0, 12, chunk.data()));
    }
  }
}
