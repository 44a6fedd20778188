// From Python objects to what the engine takes, with errors that name the argument.
#pragma once

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <string>
#include <vector>

#include "engine/communicator.h"

namespace pipecomm {

namespace py = pybind11;

// A real integer (operator.index); bool, float and str are TypeErrors.
int index_argument(py::handle object, const std::string& name);

// UTF-8; what has none, of a file name of other bytes, is written as an escape.
std::string text_argument(const py::str& text);

// None -> nullopt; a positive number of seconds or a timedelta. Zero, negative, NaN and absurdly
// large values are ValueErrors, infinity is legal and means "no limit".
std::optional<std::chrono::nanoseconds> timeout_argument(py::handle object);

enum class Access : uint8_t { read, write };

// A dense tensor on `device`, any device of its kind if it has no index. For Access::write also: no expanded memory, no conjugate view, no
// autograd leaf.
at::Tensor tensor_argument(py::handle object, const std::string& name, Access access,
                           at::Device device);

// `keeper` keeps its memory alive; by default that is its storage.
TensorRef tensor_ref(const at::Tensor& tensor, std::shared_ptr<void> keeper = nullptr);

// Of each tensor of an argument list, what `ref_of(object, "name[idx]", access)` makes of it.
template <class RefOf>
std::vector<TensorRef> tensor_refs(const py::sequence& tensors, const char* name, Access access,
                                   RefOf&& ref_of) {
  std::vector<TensorRef> refs;
  for (size_t idx = 0; idx < py::len(tensors); ++idx)
    refs.push_back(
        ref_of(tensors[idx], std::string(name) + "[" + std::to_string(idx) + "]", access));
  return refs;
}

// What was written to behind autograd's back is noted, so that it can complain about saved tensors.
void mark_written(const at::Tensor& tensor);

// The Python exception of a failure, with its fields as attributes.
void raise_failure(const Failure& failure);

// Runs pending signal handlers (Ctrl-C); call without the GIL.
void check_signals();

}  // namespace pipecomm
