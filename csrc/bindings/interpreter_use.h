// Calls of Python on threads of the library. A thread that asks for the GIL while the interpreter is
// ending crashes the process.
#pragma once

#include "bindings/python.h"

namespace pipecomm {

// While one exists, the end of the interpreter waits for a limited time.
class InterpreterUse {
 public:
  InterpreterUse();  // throws std::runtime_error once the interpreter is ending
  ~InterpreterUse();
  InterpreterUse(const InterpreterUse&) = delete;
  InterpreterUse& operator=(const InterpreterUse&) = delete;
};

void bind_interpreter_use(py::module_& m);

}  // namespace pipecomm
