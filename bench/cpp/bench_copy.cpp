// Speed of packing against a memcpy of the same bytes, both into warm buffers.
//
//   cmake -S tests/cpp -B build/cpp && cmake --build build/cpp --target bench_copy
//   build/cpp/bench_copy [megabytes = 25] [threads = 1]
//
// The case is an all-to-all of [tokens, heads, dim] that scatters the heads over 8 ranks: a run is
// what one rank gets of one token. Rank 0's own share is left out on both sides. Median of
// alternating repetitions; GB/s counts each byte once.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#include "copy/copy_cpu.h"
#include "plan/builders.h"

namespace {

using namespace pipecomm;

constexpr int kNumRanks = 8;
constexpr int kRepetitions = 41;

double seconds(const std::function<void()>& body) {
  const auto begin = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

void measure(const char* what, int64_t run_bytes, int64_t bytes, const std::function<void()>& copy,
             const std::function<void()>& reference) {
  std::vector<double> copy_times, reference_times;
  for (int i = 0; i < kRepetitions + 3; ++i) {
    const double reference_time = seconds(reference), copy_time = seconds(copy);
    if (i < 3) continue;
    reference_times.push_back(reference_time);
    copy_times.push_back(copy_time);
  }
  const double copy_time = median(copy_times), reference_time = median(reference_times);
  std::printf("%-7s %10lld %10.2f %10.2f %10.2f %8.2f\n", what, static_cast<long long>(run_bytes),
              bytes / 1e6, bytes / copy_time / 1e9, bytes / reference_time / 1e9,
              reference_time / copy_time);
}

}  // namespace

int main(int argc, char** argv) {
  const int64_t target_bytes = (argc > 1 ? std::atoll(argv[1]) : 25) * 1000 * 1000;
  ThreadPool pool(argc > 2 ? std::atoi(argv[2]) : 1);
  std::printf("%-7s %10s %10s %10s %10s %8s\n", "copy", "run(B)", "MB", "GB/s", "memcpy", "ratio");
  for (int64_t run_bytes : {16, 64, 128, 256, 512, 520, 768, 1024, 2048, 4096, 16384}) {
    const int64_t num_tokens = target_bytes / (run_bytes * kNumRanks);
    const TensorSpec input{{1, num_tokens, kNumRanks, run_bytes}, dtypes::kUInt8};
    const Sizes heads(kNumRanks, 1);
    const Sizes tokens(kNumRanks, num_tokens);
    const ExchangePlan forward = all_to_all_plan({0, kNumRanks}, {{input, heads, tokens}}, 2, 1);
    const ExchangePlan backward =
        all_to_all_plan({0, kNumRanks}, {{forward.outputs[0], tokens, heads}}, 1, 2);
    const auto lowered = [](const ExchangePlan& plan) {
      return lower(plan, {StridedLayout::contiguous(plan.inputs[0])},
                   {StridedLayout::contiguous(plan.outputs[0])});
    };
    const LoweredExchange pack = lowered(forward), unpack = lowered(backward);
    std::vector<char> tensor(input.bytes(), 1), output(input.bytes(), 2),
        memory(input.bytes() + 64);
    void* const staging =
        reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) & ~uintptr_t{63});
    const auto whole_pass = [&](const char* name, std::span<const CopyTask> tasks) {
      const void* const inputs[] = {tensor.data()};
      void* const outputs[] = {output.data()};
      const CopyBuffers buffers{inputs, outputs, staging, staging};
      measure(
          name, run_bytes, input.bytes(), [&] { execute_cpu(tasks, buffers, {}, &pool); },
          [&] { std::memcpy(output.data(), tensor.data(), input.bytes()); });
    };
    whole_pass("pack", pack.pack_and_local());
    whole_pass("unpack", unpack.tasks);
  }
  return 0;
}
