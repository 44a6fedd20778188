// The real device behind DeviceRuntime.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "copy/device_runtime.h"

namespace pipecomm {

// All of this exists only with PIPECOMM_WITH_CUDA. `num_sms`: multiprocessors that pack and unpack
// kernels may occupy, 0: all. Loads the kernels; without any for this device, the driver copies boxes
// one by one and nothing can be scaled. Throws std::runtime_error if there is no such device.
std::shared_ptr<DeviceRuntime> make_cuda_runtime(int device_idx, int num_sms);

// From now on, calls of this thread do not disturb captures on other threads.
void relax_captures();

// Why the kernels cannot be loaded on the device, or "".
std::string cuda_kernel_problem(int device_idx);

// mean_cuda on the current stream of the calling thread. Throws std::runtime_error with CUDA's
// text.
void mean_on_current_stream(int device_idx, void* dst, std::span<const void* const> srcs,
                            int64_t count, DType dtype);

}  // namespace pipecomm
