// Python's view of the communicator for tensors in device memory.
#pragma once

#include <torch/python.h>

namespace pipecomm {

void bind_device(pybind11::module_& m);

}  // namespace pipecomm
