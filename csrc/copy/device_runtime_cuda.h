// The real device behind DeviceRuntime.
#pragma once

#include <memory>

#include "copy/device_runtime.h"

namespace pipecomm {

// Exists if PIPECOMM_WITH_CUDA. `num_sms`: multiprocessors that pack and unpack kernels may occupy,
// 0: all. Loads the kernels. Throws std::runtime_error if there is no such device.
std::shared_ptr<DeviceRuntime> make_cuda_runtime(int device_idx, int num_sms);

}  // namespace pipecomm
