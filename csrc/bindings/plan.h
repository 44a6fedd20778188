// Python's view of exchange plans and their builders.
#pragma once

#include <pybind11/pybind11.h>

#include "bindings/python.h"

namespace pipecomm {

void bind_plan(py::module_& m);

}  // namespace pipecomm
