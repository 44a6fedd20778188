// The mean of tensors as one fused kernel.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace pipecomm {

void bind_mean(pybind11::module_& m);

}  // namespace pipecomm
