// From Python objects to what the engine takes, with errors that name the argument.
#pragma once

#include <optional>
#include <string>

#include "bindings/python.h"
#include "copy/reduce_cpu.h"
#include "engine/communicator.h"

namespace pipecomm {

// A real integer (operator.index); bool, float and str are TypeErrors.
int index_argument(py::handle object, const std::string& name);

// UTF-8; characters without one, as in file names of other bytes, are written as escapes.
std::string text_argument(const py::str& text);

// What a peer or the system has written: may be cut off within a character, or not be valid text.
py::object text_of(const std::string& bytes);

// None -> nullopt; a positive number of seconds or a timedelta. Zero, negative, NaN and absurdly
// large values are ValueErrors, infinity is legal and means "no limit".
std::optional<std::chrono::nanoseconds> timeout_argument(py::handle object);

// The Python exception of a failure, with its fields as attributes.
void raise_failure(const Failure& failure);

// Runs pending signal handlers (Ctrl-C); call without the GIL.
void check_signals();
// The same in the wait of a call that has been posted. An attribute of this name marks the exception:
// the call cannot be refused any more.
void check_signals_of_posted();
inline constexpr const char* kPostedMark = "_pipecomm_posted";

// By the name that torch.distributed.ReduceOp has for it.
Reduction reduction_argument(const std::string& name);

}  // namespace pipecomm
