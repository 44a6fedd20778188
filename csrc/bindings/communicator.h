// Python's view of the communicators for tensors in host and in device memory.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace pipecomm {

void bind_communicator(pybind11::module_& m);
void bind_device_communicator(pybind11::module_& m);

}  // namespace pipecomm
