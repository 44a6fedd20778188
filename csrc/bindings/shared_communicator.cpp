#include "bindings/shared_communicator.h"

#include "bindings/interpreter_use.h"
#include "bindings/module.h"
#include "message/start_thread.h"

namespace pipecomm {
namespace {

void delete_on_another_thread(Communicator* communicator) {
  try {
    // Its threads call Python. The use begins here, so the interpreter cannot end before the thread runs.
    const auto body = [communicator, use = std::make_shared<InterpreterUse>()] {
      leave_behind();
      delete communicator;
    };
    start_thread(body, communicator->rank()).detach();
  } catch (const std::exception&) {
    // No thread can be started, or the interpreter is ending: it stays until the process ends.
  }
}

}  // namespace

std::shared_ptr<Communicator> shared_with_python(std::unique_ptr<Communicator> made) {
  return {made.release(), [](Communicator* communicator) {
            if (communicator->is_in_fork()) return;
            if (is_own_thread) return delete_on_another_thread(communicator);
            if (!PyGILState_Check()) return delete communicator;
            const py::gil_scoped_release no_gil;
            delete communicator;
          }};
}

}  // namespace pipecomm
