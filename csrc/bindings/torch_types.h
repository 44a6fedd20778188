// Types and functions of torch, by way of Python: no C++ type of torch is used, so one build serves
// every torch.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "bindings/python.h"
#include "copy/dlpack.h"
#include "plan/dtype.h"

namespace pipecomm {

// A method without arguments of a class of torch, or an attribute.
class Method {
 public:
  Method(py::handle type, const char* name)
      : method_(py::object(type.attr(name)).release().ptr()) {}
  py::object operator()(py::handle object) const;
  bool is_true(py::handle object) const { return (*this)(object).ptr() == Py_True; }
  int64_t number(py::handle object) const;

 private:
  PyObject* method_;
};
class Attribute {
 public:
  explicit Attribute(const char* name) : name_(PyUnicode_InternFromString(name)) {}
  py::object operator()(py::handle object) const;
  bool is_true(py::handle object) const { return (*this)(object).ptr() == Py_True; }

 private:
  PyObject* name_;
};

// The names that the bindings use, looked up once.
struct TorchNames {
  explicit TorchNames(py::handle torch);

  py::handle torch, tensor, storage;  // the module, and classes
  py::handle parameter, default_dispatch, grad_enabled, increment_version, is_functional_tensor;
  Method untyped_storage, storage_offset, is_conj, is_neg, is_zerotensor;  // of a tensor
  Method num_bytes, data_ptr;                                              // of a storage
  bool (*has_key)(uint16_t);  // whether this thread dispatches operations to a key
  uint16_t tracer_key, mode_key, early_mode_key;
  Attribute is_nested{"is_nested"}, is_quantized{"is_quantized"}, layout{"layout"},
      device{"device"}, itemsize{"itemsize"}, dtype{"dtype"}, requires_grad{"requires_grad"},
      cdata{"_cdata"};
};
const TorchNames& torch_names();

bool is_tensor(py::handle object);
// Whether its class does not intercept operations: torch.Tensor, torch.nn.Parameter, and classes
// without a __torch_dispatch__ of their own.
bool is_plain_tensor(py::handle object);

// TypeError unless it is a torch.dtype that this build knows.
DType dtype_argument(py::handle dtype);
// The dtype of a tensor whose elements have this type in DLPack.
DType dtype_of(py::handle tensor, dlpack::DataType type);
// Nothing if DLPack has no such type.
std::optional<dlpack::DataType> dlpack_type(py::handle dtype);

bool is_grad_enabled();

// TypeError within torch.jit.trace and make_fx, which would drop the communication from their graph.
void check_not_traced();

// Tells autograd that these were written, so that it can report saved tensors that have changed.
void mark_written(std::span<const py::object> tensors);

// Looks up the names in the torch of this process. Throws py::import_error if it is too old or too new.
void load_torch_names();

}  // namespace pipecomm
