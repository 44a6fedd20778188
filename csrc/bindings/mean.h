// The mean of tensors as one fused kernel.
#pragma once

#include <pybind11/pybind11.h>

#include "bindings/python.h"

namespace pipecomm {

void bind_mean(py::module_& m);

}  // namespace pipecomm
