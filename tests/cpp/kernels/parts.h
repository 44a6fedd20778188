// The parts of the program that tests and measures the copy kernels. Each checks by CHECK.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "copy/copy_cuda.h"
#include "device.h"
#include "world.h"

namespace parts {

using namespace pipecomm;
using world::Random;

// Rows of numbers, for a table and for JSON.
struct Figures {
  std::string device = device::name();
  std::vector<std::pair<std::string, std::vector<std::pair<std::string, double>>>> rows;

  bool is_of_host() const { return device == "host"; }  // by the shim: its times mean nothing
};

void values(int64_t num_cases);
void many();
bool large(int log2_of_rows);  // false: too little device memory
void mean();
Figures bandwidth(int64_t mib);
Figures latency(int64_t num_rounds);

// Resolves the tasks and executes them.
inline void execute(std::span<const CopyTask> tasks, const CopyBuffers& buffers, const Scale& scale,
                    const CudaLaunch& launch) {
  CUDA(execute_cuda(ResolvedTasks(tasks, buffers), buffers, scale, launch));
}

// One run from the first input to the first output.
inline CopyTask run_task(int64_t src_offset_bytes, int64_t dst_offset_bytes, int64_t run_bytes) {
  CopyTask task;
  task.src_tensor_idx = task.dst_tensor_idx = 0;
  task.src_offset_bytes = src_offset_bytes;
  task.dst_offset_bytes = dst_offset_bytes;
  task.copy.run_bytes = run_bytes;
  return task;
}

}  // namespace parts
