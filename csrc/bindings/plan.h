// Python's view of exchange plans and their builders.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace pipecomm {

void bind_plan(pybind11::module_& m);

}  // namespace pipecomm
