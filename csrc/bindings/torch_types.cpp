#include "bindings/torch_types.h"

#include <dlfcn.h>

#include <bit>
#include <string>
#include <unordered_map>

#include "copy/torch_memory.h"

namespace pipecomm {
namespace {

py::object call(PyObject* function, PyObject* const* args, size_t num_args) {
  auto result =
      py::reinterpret_steal<py::object>(PyObject_Vectorcall(function, args, num_args, nullptr));
  if (!result) throw py::error_already_set();
  return result;
}

// These live as long as the process.
const TorchNames* names = nullptr;
std::unordered_map<PyObject*, DType>* known_dtypes = nullptr;
std::unordered_map<uint32_t, DType>* dtypes_by_dlpack = nullptr;  // filled as types occur

uint32_t key_of(dlpack::DataType type) { return std::bit_cast<uint32_t>(type); }
dlpack::DataType type_of(uint32_t key) { return std::bit_cast<dlpack::DataType>(key); }

py::handle forever(py::object object) { return object.release(); }

// One of an enumeration that Python shows in part.
uint16_t dispatch_key(py::handle torch, const char* name) {
  return torch.attr("_C").attr("_parse_dispatch_key")(name).attr("value").cast<uint16_t>();
}

bool has_key_by_python(uint16_t key) {
  const py::object torch_c = names->torch.attr("_C");
  return torch_c.attr("_dispatch_tls_is_dispatch_key_included")(torch_c.attr("DispatchKey")(key))
      .cast<bool>();
}

// torch's own function takes a nanosecond, with Python in between fifty.
bool (*key_test())(uint16_t) {
  constexpr const char* kName = "_ZN3c104impl28tls_is_dispatch_key_includedENS_11DispatchKeyE";
  void* const library = dlopen("libc10.so", RTLD_NOLOAD | RTLD_NOW);
  void* const test = library ? dlsym(library, kName) : nullptr;
  return test ? reinterpret_cast<bool (*)(uint16_t)>(test) : has_key_by_python;
}

}  // namespace

py::object Method::operator()(py::handle object) const {
  PyObject* const self = object.ptr();
  return call(method_, &self, 1);
}

int64_t Method::number(py::handle object) const {
  const int64_t value = PyLong_AsLongLong((*this)(object).ptr());
  if (value == -1 && PyErr_Occurred()) throw py::error_already_set();
  return value;
}

py::object Attribute::operator()(py::handle object) const {
  auto value = py::reinterpret_steal<py::object>(PyObject_GetAttr(object.ptr(), name_));
  if (!value) throw py::error_already_set();
  return value;
}

// torch.autograd.graph.increment_version is the public function; the one it calls takes a third of its
// time.
TorchNames::TorchNames(py::handle module)
    : torch(module),
      tensor(forever(torch.attr("Tensor"))),
      storage(forever(torch.attr("UntypedStorage"))),
      parameter(forever(torch.attr("nn").attr("Parameter"))),
      default_dispatch(forever(tensor.attr("__torch_dispatch__"))),
      grad_enabled(forever(torch.attr("is_grad_enabled"))),
      increment_version(forever(torch.attr("_C").attr("_increment_version"))),
      is_functional_tensor(forever(torch.attr("_is_functional_tensor"))),
      untyped_storage(tensor, "untyped_storage"),
      storage_offset(tensor, "storage_offset"),
      is_conj(tensor, "is_conj"),
      is_neg(tensor, "is_neg"),
      is_zerotensor(tensor, "_is_zerotensor"),
      num_bytes(storage, "nbytes"),
      data_ptr(storage, "data_ptr"),
      has_key(key_test()),
      tracer_key(dispatch_key(torch, "Tracer")),
      mode_key(dispatch_key(torch, "Python")),
      early_mode_key(dispatch_key(torch, "PreDispatch")) {}

const TorchNames& torch_names() { return *names; }

bool is_tensor(py::handle object) {
  PyTypeObject* const type = Py_TYPE(object.ptr());
  auto* const tensor = reinterpret_cast<PyTypeObject*>(names->tensor.ptr());
  return type == tensor || PyType_IsSubtype(type, tensor);
}

bool is_plain_tensor(py::handle object) {
  const py::handle type(reinterpret_cast<PyObject*>(Py_TYPE(object.ptr())));
  if (type.is(names->tensor) || type.is(names->parameter)) return true;
  return py::object(type.attr("__torch_dispatch__")).is(names->default_dispatch);
}

DType dtype_argument(py::handle dtype) {
  const auto found = known_dtypes->find(dtype.ptr());
  if (found != known_dtypes->end()) return found->second;
  throw py::type_error("this version of pipecomm_ext does not know the dtype " +
                       py::repr(dtype).cast<std::string>());
}

DType dtype_of(py::handle tensor, dlpack::DataType type) {
  const auto found = dtypes_by_dlpack->find(key_of(type));
  if (found != dtypes_by_dlpack->end()) return found->second;
  const DType result = dtype_argument(names->dtype(tensor));
  // int1 to int7 are int8 to DLPack.
  const bool is_ambiguous = type.code <= dlpack::kUInt && type.bits == 8;
  if (!is_ambiguous) dtypes_by_dlpack->emplace(key_of(type), result);
  return result;
}

std::optional<dlpack::DataType> dlpack_type(py::handle dtype) {
  for (const auto& [type, known] : *dtypes_by_dlpack)
    if (known == dtype_argument(dtype)) return type_of(type);
  const py::object none = names->torch.attr("empty")(0, py::arg("dtype") = dtype);
  dlpack::Tensor view;
  if (exchange_api().tensor_from_python(none.ptr(), &view) == 0) {
    dtype_of(none, view.dtype);  // caches it
    return view.dtype;
  }
  PyErr_Clear();
  return std::nullopt;
}

void check_not_traced() {
  const auto has_proxies = [] {
    const auto tensors = py::module_::import("torch.fx.experimental.proxy_tensor");
    return !tensors.attr("get_proxy_mode")().is_none();
  };
  const bool has_modes = names->has_key(names->mode_key) || names->has_key(names->early_mode_key);
  if (names->has_key(names->tracer_key) || (has_modes && has_proxies()))
    throw py::type_error(
        "torch.jit.trace and make_fx cannot record communication, which their graphs would not "
        "repeat; use torch.compile or torch.export");
}

bool is_grad_enabled() { return call(names->grad_enabled.ptr(), nullptr, 0).ptr() == Py_True; }

void mark_written(std::span<const py::object> tensors) {
  py::tuple tuple(tensors.size());
  for (size_t idx = 0; idx < tensors.size(); ++idx) tuple[idx] = tensors[idx];
  PyObject* const args = tuple.ptr();
  call(names->increment_version.ptr(), &args, 1);
}

void load_torch_names() {
  const py::object torch = py::module_::import("torch");
  const py::object capsule = torch.attr("Tensor").attr("__dlpack_c_exchange_api__");
  const auto* const api = static_cast<const dlpack::ExchangeApi*>(
      PyCapsule_GetPointer(capsule.ptr(), dlpack::kCapsuleName));
  if (!api) throw py::error_already_set();
  if (api->version.major != dlpack::kMajorVersion || !api->tensor_from_python)
    throw py::import_error("this torch exchanges tensors by DLPack " +
                           std::to_string(api->version.major) +
                           ", and this version of pipecomm_ext by DLPack 1");
  set_exchange_api(*api);
  names = new TorchNames(forever(torch));
  known_dtypes = new std::unordered_map<PyObject*, DType>;
  dtypes_by_dlpack = new std::unordered_map<uint32_t, DType>;
  for (int number = 0; number < num_dtypes(); ++number) {
    const auto code = static_cast<uint8_t>(number);
    const char* const name = dtype_name(code);
    if (!py::hasattr(torch, name)) continue;  // added in a later torch
    const py::handle dtype = forever(torch.attr(name));
    known_dtypes->emplace(dtype.ptr(), DType{code, dtype.attr("itemsize").cast<uint8_t>()});
  }
}

}  // namespace pipecomm
