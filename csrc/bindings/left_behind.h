// Threads of Python's that may be left behind in a call of torch's when the interpreter ends.
#pragma once

#include <pybind11/pybind11.h>

#include "bindings/python.h"

namespace pipecomm {

void bind_left_behind(py::module_& m);

}  // namespace pipecomm
