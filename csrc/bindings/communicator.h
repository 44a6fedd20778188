// Binds Python's communicator, with a constructor for each execution.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace pipecomm {

class BoundCommunicator;

pybind11::class_<BoundCommunicator> bind_communicator(pybind11::module_& m);
void bind_device_communicator(pybind11::module_& m,
                              pybind11::class_<BoundCommunicator>& communicator);

}  // namespace pipecomm
