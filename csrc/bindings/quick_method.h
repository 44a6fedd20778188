// Methods that Python calls without pybind11's dispatch, which takes as long as the rest of a small call
// into C++: no overloads, no names of arguments, objects as they are.
#pragma once

#include <cstddef>
#include <exception>
#include <type_traits>
#include <utility>

#include "bindings/python_args.h"

namespace pipecomm {

template <class Method>
struct MethodParts;
template <class Class_, class Result_, class... Args>
struct MethodParts<Result_ (Class_::*)(Args...)> {
  static_assert((std::is_same_v<Args, const py::object&> && ...));
  using Class = Class_;
  using Result = Result_;
  static constexpr size_t kNumArgs = sizeof...(Args);
};

template <auto kMethod>
PyObject* call_method(PyObject* self, PyObject* const* args, Py_ssize_t num_args) {
  using Parts = MethodParts<decltype(kMethod)>;
  try {
    if (num_args != Parts::kNumArgs)
      throw py::type_error("takes " + std::to_string(Parts::kNumArgs) +
                           " positional arguments, not " + std::to_string(num_args));
    auto* const object = reinterpret_cast<py::detail::instance*>(self)
                             ->get_value_and_holder()
                             .template value_ptr<typename Parts::Class>();
    if (!object) throw py::type_error("the object was made without a call of __init__");
    const auto call = [&]<size_t... idx>(std::index_sequence<idx...>) {
      return (object->*kMethod)(py::reinterpret_borrow<py::object>(args[idx])...);
    };
    constexpr auto kArgs = std::make_index_sequence<Parts::kNumArgs>();
    if constexpr (std::is_void_v<typename Parts::Result>) {
      call(kArgs);
      Py_RETURN_NONE;
    } else {
      return py::cast(call(kArgs)).release().ptr();
    }
  } catch (const std::exception&) {  // not the unwinding of a thread that ends
    py::detail::try_translate_exceptions();
    return nullptr;
  }
}

// `doc` begins with the signature: "name($self, tensor, /)\n--\n\n".
template <auto kMethod>
void def_quick(py::class_<typename MethodParts<decltype(kMethod)>::Class>& type, const char* name,
               const char* doc) {
  static PyMethodDef method{name, nullptr, METH_FASTCALL, doc};
  method.ml_meth =
      reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&call_method<kMethod>));
  type.attr(name) = py::reinterpret_steal<py::object>(
      PyDescr_NewMethod(reinterpret_cast<PyTypeObject*>(type.ptr()), &method));
}

}  // namespace pipecomm
