// pybind11, with the conversions of the standard library's containers: a file without these compiles,
// but its functions fail when called.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

namespace pipecomm {

namespace py = pybind11;

}  // namespace pipecomm
