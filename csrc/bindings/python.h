// pybind11, with the conversions of the standard library's containers: a file without these would
// compile, and fail when it is called.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

namespace pipecomm {

namespace py = pybind11;

}  // namespace pipecomm
