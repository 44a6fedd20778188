#include "bindings/module.h"

#include <unistd.h>

#include <exception>

#include "message/start_thread.h"

namespace pipecomm {
namespace {

thread_local bool is_left_behind = false;
std::terminate_handler others = nullptr;

// Before 3.14, Python ends a thread that requests the GIL once the interpreter ends. A destructor of pybind11
// requests it when the call returns, and a thread that ends within a destructor aborts the process.
[[noreturn]] void stay_or_terminate() {
  while (is_left_behind) pause();  // the process ends without this thread
  others();
  std::terminate();
}

}  // namespace

void leave_behind() {
  static const bool is_set = (others = std::set_terminate(stay_or_terminate)) != nullptr;
  static_cast<void>(is_set);
  is_left_behind = is_own_thread = true;
}

void bind_left_behind(py::module_& m) {
  m.def("leave_behind", &leave_behind,
        "The calling thread may be left in a call when the interpreter ends: it does not abort the "
        "process.");
}

}  // namespace pipecomm
