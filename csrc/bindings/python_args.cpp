#include "bindings/python_args.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>

namespace pipecomm {
namespace {

std::string type_name(py::handle object) { return Py_TYPE(object.ptr())->tp_name; }

// Also true for a few layouts of interleaved dims that do not overlap; they do not occur in practice.
bool elements_share_memory(const at::Tensor& tensor) {
  if (tensor.numel() < 2 || tensor.is_non_overlapping_and_dense()) return false;
  std::vector<std::pair<int64_t, int64_t>> dims;  // stride, size
  for (int64_t dim = 0; dim < tensor.dim(); ++dim)
    if (tensor.size(dim) > 1) dims.emplace_back(tensor.stride(dim), tensor.size(dim));
  std::sort(dims.begin(), dims.end());
  int64_t reach = 0;  // furthest offset of an element over the dims so far
  for (const auto& [stride, size] : dims) {
    if (stride <= reach) return true;
    reach += (size - 1) * stride;
  }
  return false;
}

[[noreturn]] void throw_value_error(const std::string& text) { throw py::value_error(text); }

// The storage of a tensor may have been freed or shrunk, as sharded training does with parameters.
void check_memory(const at::Tensor& tensor, const std::string& name) {
  if (tensor.numel() == 0) return;
  int64_t num_elements = tensor.storage_offset() + 1;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim)
    num_elements += (tensor.size(dim) - 1) * tensor.stride(dim);
  const c10::Storage& storage = tensor.storage();
  const auto num_bytes = static_cast<uint64_t>(num_elements * tensor.element_size());
  if (storage.nbytes() < num_bytes || !storage.data())
    throw_value_error(name + " needs " + std::to_string(num_bytes) +
                      " bytes of its storage, which has " +
                      std::to_string(storage.data() ? storage.nbytes() : 0) +
                      "; its memory has been freed or resized");
}

}  // namespace

int index_argument(py::handle object, const std::string& name) {
  if (PyBool_Check(object.ptr()) || !PyIndex_Check(object.ptr()))
    throw py::type_error(name + " must be an int, not " + type_name(object));
  const auto number = py::reinterpret_steal<py::object>(PyNumber_Index(object.ptr()));
  if (!number) throw py::error_already_set();
  int overflow = 0;
  const long long value = PyLong_AsLongLongAndOverflow(number.ptr(), &overflow);
  if (overflow != 0 || value < INT_MIN || value > INT_MAX)
    throw_value_error(name + " " + py::str(number).cast<std::string>() + " is out of range");
  return static_cast<int>(value);
}

std::string text_argument(const py::str& text) {
  const auto bytes = py::reinterpret_steal<py::bytes>(
      PyUnicode_AsEncodedString(text.ptr(), "utf-8", "backslashreplace"));
  if (!bytes) throw py::error_already_set();
  return bytes;
}

std::optional<std::chrono::nanoseconds> timeout_argument(py::handle object) {
  if (object.is_none()) return std::nullopt;
  double seconds;
  if (PyFloat_Check(object.ptr()) || (PyLong_Check(object.ptr()) && !PyBool_Check(object.ptr()))) {
    seconds = PyFloat_AsDouble(object.ptr());
    if (PyErr_Occurred()) throw py::error_already_set();
  } else if (py::hasattr(object, "total_seconds")) {
    seconds = object.attr("total_seconds")().cast<double>();
  } else {
    throw py::type_error("timeout must be a number of seconds, a timedelta or None, not " +
                         type_name(object));
  }
  if (std::isinf(seconds) && seconds > 0) return std::nullopt;
  constexpr double kMaxSeconds = 10.0 * 365 * 86400;
  if (!(seconds > 0) || seconds > kMaxSeconds)
    throw_value_error(
        "timeout must be more than 0 and at most 10 years (math.inf: no limit), not " +
        py::repr(object).cast<std::string>());
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
      std::chrono::duration<double>(seconds));
}

at::Tensor tensor_argument(py::handle object, const std::string& name, Access access,
                           at::Device device) {
  if (!THPVariable_Check(object.ptr()))
    throw py::type_error(name + " must be a torch.Tensor, not " + type_name(object));
  at::Tensor tensor = THPVariable_Unpack(object.ptr());
  if (!tensor.defined()) throw_value_error(name + " is undefined");
  if (tensor.key_set().has(c10::DispatchKey::Python))
    throw py::type_error(name + " is a " + type_name(object) +
                         "; pass a plain torch.Tensor (its local, real data)");
  if (tensor.layout() != at::kStrided || tensor.is_nested() || tensor.is_quantized())
    throw_value_error(name + " must be a dense tensor, not " +
                      (tensor.is_nested()      ? std::string("nested")
                       : tensor.is_quantized() ? std::string("quantized")
                                               : c10::str(tensor.layout())));
  const bool is_zeros = tensor._is_zerotensor();  // has a shape and no memory
  if (!is_zeros && (!tensor.has_storage() || tensor.key_set().has(c10::DispatchKey::Functionalize)))
    throw py::type_error(name +
                         " is inside a transform (vmap, torch.func, functionalize), which "
                         "communication cannot follow; pass a plain torch.Tensor");
  if (tensor.device().type() != device.type() || (device.has_index() && tensor.device() != device))
    throw_value_error(name + " is on " + tensor.device().str() + ", but the communicator is for " +
                      device.str() + " tensors");
  if (access == Access::read) {
    if (is_zeros) return at::zeros(tensor.sizes(), tensor.options());
    check_memory(tensor, name);
    if (tensor.is_conj() || tensor.is_neg()) {
      at::NoGradGuard no_grad;
      tensor = tensor.resolve_conj().resolve_neg();
    }
    return tensor;
  }
  if (tensor.is_conj() || tensor.is_neg())
    throw_value_error(
        name +
        " is a conjugate or negative view; receive into its base and take the view afterwards");
  if (is_zeros)
    throw_value_error(name +
                      " stands for zeros and has no memory; receive into an ordinary tensor");
  check_memory(tensor, name);
  if (elements_share_memory(tensor))
    throw_value_error(name +
                      " is expanded or has overlapping strides: several of its elements share "
                      "memory; receive into a tensor of its own");
  if (tensor.requires_grad() && at::GradMode::is_enabled())
    throw_value_error(
        name +
        " requires grad; receive into a tensor that does not, and call requires_grad_() after, or "
        "receive under torch.no_grad()");
  return tensor;
}

TensorRef tensor_ref(const at::Tensor& tensor, std::shared_ptr<void> keeper) {
  TensorRef ref;
  ref.data = static_cast<std::byte*>(tensor.data_ptr());
  ref.dtype = {static_cast<uint8_t>(tensor.scalar_type()),
               static_cast<uint8_t>(tensor.element_size())};
  ref.shape.assign(tensor.sizes().begin(), tensor.sizes().end());
  ref.strides.assign(tensor.strides().begin(), tensor.strides().end());
  ref.storage = keeper ? std::move(keeper) : std::make_shared<c10::Storage>(tensor.storage());
  return ref;
}

void mark_written(const at::Tensor& tensor) {
  if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
}

void raise_failure(const Failure& failure) {
  const auto errors = py::module_::import("pipecomm_ext.errors");
  static constexpr const char* kNames[] = {"PipeCommError", "PipeCommTimeout", "PipeCommPeerLost",
                                           "PipeCommMismatch", "PipeCommAborted"};
  auto optional = [](int64_t value) -> py::object {
    return value < 0 ? py::none() : py::object(py::int_(value));
  };
  // Texts of peers may be cut off within a character, or be no text at all.
  auto text = [](const std::string& bytes) {
    return py::reinterpret_steal<py::object>(
        PyUnicode_DecodeUTF8(bytes.data(), static_cast<Py_ssize_t>(bytes.size()), "replace"));
  };
  const std::string who = failure.rank < 0 ? "" : "rank " + std::to_string(failure.rank) + ": ";
  const py::object error = errors.attr(kNames[static_cast<int>(failure.kind)])(
      text(who + failure.message), py::arg("op") = text(failure.op),
      py::arg("rank") = optional(failure.rank), py::arg("peer") = optional(failure.peer),
      py::arg("channel") = optional(failure.channel), py::arg("seq") = optional(failure.seq),
      py::arg("dtype") = text(failure.dtype), py::arg("shape") = py::tuple(py::cast(failure.shape)),
      py::arg("origin_rank") = optional(failure.origin_rank));
  const auto describe = [&](const char* name, const std::optional<MessageDescription>& side) {
    if (side)
      error.attr(name) = errors.attr("MessageDescription")(
          text(side->op), text(side->dtype), py::tuple(py::cast(side->shape)), side->num_bytes);
  };
  describe("ours", failure.ours);
  describe("theirs", failure.theirs);
  PyErr_SetObject(py::type::of(error).ptr(), error.ptr());
}

void check_signals() {
  py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

}  // namespace pipecomm
