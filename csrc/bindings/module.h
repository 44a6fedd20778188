// The parts of the module whose C++ only the module uses.
#pragma once

#include "bindings/python.h"

namespace pipecomm {

// How this build was made.
void bind_build_info(py::module_& m);
// Python threads that may be left behind in a call of torch when the interpreter ends.
void bind_left_behind(py::module_& m);
// Makes the calling thread one of them, and is_own_thread true.
void leave_behind();
// Exchange plans and their builders.
void bind_plan(py::module_& m);
// Reductions of tensors, one pass each.
void bind_reduce(py::module_& m);

}  // namespace pipecomm
