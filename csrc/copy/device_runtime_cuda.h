// The real device behind DeviceRuntime.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "copy/device_runtime.h"

namespace pipecomm {

// Exists if PIPECOMM_WITH_CUDA. `num_sms`: multiprocessors that pack and unpack kernels may occupy,
// 0: all. Loads the kernels. Throws std::runtime_error if there is no such device.
std::shared_ptr<DeviceRuntime> make_cuda_runtime(int device_idx, int num_sms);

// mean_cuda on the current stream of the calling thread; throws what CUDA has to say.
void mean_on_current_stream(int device_idx, void* dst, std::span<const void* const> srcs,
                            int64_t count, DType dtype);

}  // namespace pipecomm
