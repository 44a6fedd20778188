#include "bindings/interpreter_use.h"

#include <atomic>
#include <chrono>
#include <stdexcept>
#include <thread>

#include "copy/fork_mark.h"

namespace pipecomm {
namespace {

struct Uses {
  std::atomic<int> num{0};
  std::atomic<bool> is_over{false};
  ForkMark mark;
};

// Never freed, since threads may outlive static objects. A fork has no other thread and starts with
// new ones.
Uses& uses() {
  static std::atomic<Uses*> current = new Uses;
  if (current.load()->mark.is_in_fork()) current = new Uses;
  return *current;
}

// Waits for the existing uses, and then permits no further one.
void end_interpreter_use(double limit_s) {
  const py::gil_scoped_release no_gil;
  const auto limit = std::chrono::steady_clock::now() +
                     std::chrono::duration_cast<std::chrono::steady_clock::duration>(
                         std::chrono::duration<double>(limit_s));
  const auto wait = [&] {
    while (uses().num > 0 && std::chrono::steady_clock::now() < limit)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
  };
  wait();
  uses().is_over = true;
  wait();
}

}  // namespace

InterpreterUse::InterpreterUse() {
  ++uses().num;
  if (!uses().is_over) return;
  --uses().num;
  throw std::runtime_error("the interpreter is ending");
}

InterpreterUse::~InterpreterUse() { --uses().num; }

void bind_interpreter_use(py::module_& m) {
  m.def("end_interpreter_use", &end_interpreter_use, py::arg("limit_s"),
        "Waits for calls of Python on threads of the library, at most for the limit. From then on "
        "none "
        "is made: to be called when the interpreter is about to end.");
}

}  // namespace pipecomm
