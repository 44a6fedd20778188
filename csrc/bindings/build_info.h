// How this build was made.
#pragma once

#include <pybind11/pybind11.h>

#include "bindings/python.h"

namespace pipecomm {

void bind_build_info(py::module_& m);

}  // namespace pipecomm
