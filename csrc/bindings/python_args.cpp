#include "bindings/python_args.h"

#include <climits>
#include <cmath>

namespace pipecomm {
namespace {

std::string type_name(py::handle object) { return Py_TYPE(object.ptr())->tp_name; }

}  // namespace

int index_argument(py::handle object, const std::string& name) {
  if (PyBool_Check(object.ptr()) || !PyIndex_Check(object.ptr()))
    throw py::type_error(name + " must be an int, not " + type_name(object));
  const auto number = py::reinterpret_steal<py::object>(PyNumber_Index(object.ptr()));
  if (!number) throw py::error_already_set();
  int overflow = 0;
  const long long value = PyLong_AsLongLongAndOverflow(number.ptr(), &overflow);
  if (overflow != 0 || value < INT_MIN || value > INT_MAX)
    throw py::value_error(name + " " + py::str(number).cast<std::string>() + " is out of range");
  return static_cast<int>(value);
}

std::string text_argument(const py::str& text) {
  const auto bytes = py::reinterpret_steal<py::bytes>(
      PyUnicode_AsEncodedString(text.ptr(), "utf-8", "backslashreplace"));
  if (!bytes) throw py::error_already_set();
  return bytes;
}

py::object text_of(const std::string& bytes) {
  return py::reinterpret_steal<py::object>(
      PyUnicode_DecodeUTF8(bytes.data(), static_cast<Py_ssize_t>(bytes.size()), "replace"));
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
    throw py::value_error(
        "timeout must be more than 0 and at most 10 years (math.inf: no limit), not " +
        py::repr(object).cast<std::string>());
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
      std::chrono::duration<double>(seconds));
}

void raise_failure(const Failure& failure) {
  const auto errors = py::module_::import("pipecomm_ext.errors");
  static constexpr const char* kNames[] = {"PipeCommError", "PipeCommTimeout", "PipeCommPeerLost",
                                           "PipeCommMismatch", "PipeCommAborted"};
  auto optional = [](int64_t value) -> py::object {
    return value < 0 ? py::none() : py::object(py::int_(value));
  };
  const std::string who = failure.rank < 0 ? "" : "rank " + std::to_string(failure.rank) + ": ";
  const py::object error = errors.attr(kNames[static_cast<int>(failure.kind)])(
      text_of(who + failure.message), py::arg("op") = text_of(failure.op),
      py::arg("rank") = optional(failure.rank), py::arg("peer") = optional(failure.peer),
      py::arg("channel") = optional(failure.channel), py::arg("seq") = optional(failure.seq),
      py::arg("dtype") = text_of(failure.dtype),
      py::arg("shape") = py::tuple(py::cast(failure.shape)),
      py::arg("origin_rank") = optional(failure.origin_rank));
  const auto describe = [&](const char* name, const std::optional<MessageDescription>& side) {
    if (side)
      error.attr(name) = errors.attr("MessageDescription")(
          py::arg("op") = text_of(side->op), py::arg("dtype") = text_of(side->dtype),
          py::arg("shape") = py::tuple(py::cast(side->shape)),
          py::arg("num_bytes") = side->num_bytes);
  };
  describe("ours", failure.ours);
  describe("theirs", failure.theirs);
  PyErr_SetObject(py::type::of(error).ptr(), error.ptr());
}

void check_signals() {
  py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

void check_signals_of_posted() {
  py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() == 0) return;
  py::error_already_set error;
  if (PyObject_SetAttrString(error.value().ptr(), kPostedMark, Py_True) != 0) PyErr_Clear();
  throw error;
}

}  // namespace pipecomm
