// The cost of one call: on the host, and on the device in a graph, from 1 to 1000 tasks of 1 KiB.
#include <chrono>

#include "parts.h"

namespace parts {

namespace {

constexpr int kCallsOfGraph = 20;
constexpr int64_t kTaskBytes = 1024;

// Median of the rounds, each of which begins with an idle device.
template <typename Call>
double host_us(int64_t num_rounds, const device::Stream& stream, const Call& call) {
  std::vector<double> times;
  for (int64_t round = 0; round <= num_rounds; ++round) {
    stream.synchronize();
    const auto began = std::chrono::steady_clock::now();
    call();
    const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - began;
    if (round > 0) times.push_back(took.count());
  }
  stream.synchronize();
  return device::median(times);
}

}  // namespace

Figures latency(int64_t num_rounds) {
  const device::Stream stream;
  const device::Timer timer;
  Figures figures;
  for (const int num_tasks : {1, 4, 5, 8, 24, 25, 64, 196, 197, 1000}) {
    check::context = "latency, " + std::to_string(num_tasks) + " tasks";
    device::Memory source(num_tasks * kTaskBytes), target(num_tasks * kTaskBytes);
    const std::vector<uint8_t> bytes(source.size(), 0x37);
    source.upload(bytes.data());
    const void* const inputs[] = {source.data()};
    void* const outputs[] = {target.data()};
    const CopyBuffers buffers{inputs, outputs, nullptr, nullptr};
    std::vector<CopyTask> tasks;
    for (int i = 0; i < num_tasks; ++i)
      tasks.push_back(run_task(i * kTaskBytes, i * kTaskBytes, kTaskBytes));
    const ResolvedTasks resolved(tasks, buffers);
    const auto call = [&] { CUDA(execute_cuda(resolved, buffers, {}, {stream, 0})); };

    const double call_us = host_us(num_rounds, stream, call);
    const double resolve_us = host_us(num_rounds, stream, [&] { ResolvedTasks(tasks, buffers); });
    const int num_calls = figures.is_of_host() ? 1 : kCallsOfGraph;
    const device::Graph graph(stream, [&] {
      for (int i = 0; i < num_calls; ++i) call();
    });
    std::vector<double> device_us;
    for (int64_t round = 0; round < num_rounds; ++round)
      device_us.push_back(timer.us(stream, [&] { graph.launch(stream); }) / num_calls);
    CHECK(target.download() == bytes);
    figures.rows.push_back({std::to_string(num_tasks) + " tasks",
                            {{"host_us", call_us},
                             {"resolve_us", resolve_us},
                             {"device_us", device::median(device_us)}}});
  }
  return figures;
}

}  // namespace parts
