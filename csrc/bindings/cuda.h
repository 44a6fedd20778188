// The CUDA device, in builds with and without CUDA.
#pragma once

#include <memory>

#include "bindings/python.h"
#include "copy/device_runtime.h"

namespace pipecomm {

// See make_cuda_runtime. Throws std::runtime_error if this is a build without CUDA.
std::shared_ptr<DeviceRuntime> device_runtime(int device_idx, int num_sms);

void bind_cuda(py::module_& m);

}  // namespace pipecomm
